"""Makes an optimizer fit for capture: what torch calls capturable, and learning rates that live on the device.

Decides which optimizers can be captured and says why others cannot. The rates that users and schedules see stay plain
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
"""Optimizers of torch that have one kernel for all parameters on a CUDA device."""


class Rates:
    """One number per parameter group on the device, written only when it changes."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._slots = [torch.zeros((), dtype=torch.float32, device=device) for _ in optimizer.param_groups]
        self._written: list[float | None] = [None] * len(self._slots)

    def write(self, factor: float) -> None:
        """The rates of the groups, times the factor, become those of the next steps."""
        for number, (slot, group) in enumerate(zip(self._slots, self._optimizer.param_groups, strict=True)):
            rate = group["lr"]
            if isinstance(rate, Tensor):
                slot.copy_(rate * factor)
            elif rate * factor != self._written[number]:
                slot.fill_(rate * factor)
                self._written[number] = rate * factor

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The optimizer reads the slots; only while it is captured."""
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
    """One kernel for all parameters where torch has it and the user did not choose otherwise."""
    if type(optimizer) not in FUSED:
        return False
    for group in optimizer.param_groups:
        if group["foreach"] or group["fused"] is False or group["differentiable"]:
            return False
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    return True


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Let torch keep on the device what it would read on the host; raises Uncapturable where it cannot."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        elif isinstance(optimizer, torch.optim.SGD):
            # The only form of SGD that takes its rate from the device.
            group["fused"], group["foreach"] = True, False
        else:
            raise Uncapturable(f"{type(optimizer).__name__} has no form in torch that can be captured")
    for state in optimizer.state.values():
        step = state.get("step")
        if isinstance(step, Tensor):
            state["step"] = step.to(device)


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What a capture bakes in: everything of the groups but parameters and rates."""
    baked = ("params", "lr", "initial_lr")
    return [{key: value for key, value in group.items() if key not in baked} for group in optimizer.param_groups]


class OptimizerForm:
    """The form in which torch runs an optimizer (capturable, fused, foreach), to go back to."""

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
        """torch reads the number of steps on the host, unless the form says otherwise."""
        step = self._optimizer.state.get(parameter, {}).get("step")
        if isinstance(step, Tensor) and step.device != device:
            self._optimizer.state[parameter]["step"] = step.to(device)
