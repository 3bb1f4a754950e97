"""Predicts how much state an optimizer will keep, before its first step.

Decides from the optimizer's class and settings; for unknown classes it counts only existing state. Called before
training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Settings = Mapping[str, Any]

_COPIES: dict[str, Callable[[Settings], int]] = {
    "SGD": lambda group: bool(group["momentum"]),
    "Adam": lambda group: 2 + group["amsgrad"],
    "AdamW": lambda group: 2 + group["amsgrad"],
    "NAdam": lambda group: 2,
    "RAdam": lambda group: 2,
    "Adamax": lambda group: 2,
    "Adadelta": lambda group: 2,
    "Adagrad": lambda group: 1,
    "RMSprop": lambda group: 1 + bool(group["momentum"]) + bool(group["centered"]),
    "Rprop": lambda group: 2,
    "ASGD": lambda group: 1,
    "Muon": lambda group: 1,
}
"""Tensors of a parameter's size and dtype that each optimizer of torch keeps per parameter."""


def state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Bytes of its state after its first step; None for an optimizer that is not torch's own."""
    there = present_bytes(optimizer)
    copies = _COPIES.get(type(optimizer).__name__)
    if copies is None or not type(optimizer).__module__.startswith("torch.optim"):
        return there or None
    expected = sum(
        copies(group) * int(parameter.nbytes)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    )
    return max(there, expected)


def present_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of existing state, such as that of a loaded checkpoint."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
