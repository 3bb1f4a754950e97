"""Prepares an optimizer for capture: torch's `capturable` mode, and learning rates on the device.

Decides which optimizers can be captured, with the reason if not. Users and schedules still see learning rates as plain
numbers in the parameter groups. Called by `CapturedSteps`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from outrider.replica.capture import Uncapturable

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers of torch with a fused kernel on CUDA devices."""


class Rates:
    """One number per parameter group on the device, written only when it changes."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._slots = [torch.zeros((), dtype=torch.float32, device=device) for _ in optimizer.param_groups]
        self._written: list[float | None] = [None] * len(self._slots)

    def write(self, factor: float) -> None:
        """Set the rates of the next steps: the groups' rates times the factor."""
        for number, (slot, group) in enumerate(zip(self._slots, self._optimizer.param_groups, strict=True)):
            rate = group["lr"]
            if isinstance(rate, Tensor):
                slot.copy_(rate * factor)
            elif rate * factor != self._written[number]:
                slot.fill_(rate * factor)
                self._written[number] = rate * factor

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Make the optimizer read the slots; only during a capture."""
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, slot in zip(groups, self._slots, strict=True):
            group["lr"] = slot
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


def fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Use the fused kernel if torch has one and the user did not choose otherwise."""
    if type(optimizer) not in FUSED:
        return False
    for group in optimizer.param_groups:
        if group["foreach"] or group["fused"] is False or group["differentiable"]:
            return False
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    return True


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Make torch keep optimizer state on the device; raises Uncapturable if that is not possible."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        elif isinstance(optimizer, torch.optim.SGD):
            # Only fused SGD reads its rate from the device.
            group["fused"], group["foreach"] = True, False
        else:
            raise Uncapturable(f"{type(optimizer).__name__} has no form in torch that can be captured")
    for state in optimizer.state.values():
        step = state.get("step")
        if isinstance(step, Tensor):
            state["step"] = step.to(device)


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options that a capture fixes: all options of the groups except parameters and rates."""
    baked = ("params", "lr", "initial_lr")
    return [{key: value for key, value in group.items() if key not in baked} for group in optimizer.param_groups]


class OptimizerForm:
    """The implementation that torch uses (capturable, fused, foreach), to restore it later."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        names = ("capturable", "fused", "foreach")
        self._groups = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]

    def restore(self) -> None:
        for group, form in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(form)
            for parameter in group["params"]:
                is_on_device = form.get("capturable") or form.get("fused")
                self._move_step(parameter, parameter.device if is_on_device else torch.device("cpu"))

    def _move_step(self, parameter: Tensor, device: torch.device) -> None:
        """Move the step count to the device that the implementation needs; by default torch reads it on the host."""
        step = self._optimizer.state.get(parameter, {}).get("step")
        if isinstance(step, Tensor) and step.device != device:
            self._optimizer.state[parameter]["step"] = step.to(device)
