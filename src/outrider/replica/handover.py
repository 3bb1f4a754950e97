"""Brings a replica to where another stands beside its parameters: the state of the optimizer, and the steps it took.

Decides that what is there is written in place, since captured steps know it by its address. Called where one rank
worked alone.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from outrider.replica.rates import OptimizerForm
from outrider.replica.replica import Replica


def pack(replica: Replica) -> bytes:
    """Everything that its steps changed beside parameters, buffers and the schedule, which follows the samples."""
    buffer = io.BytesIO()
    torch.save({"optimizer": replica.optimizer.state_dict()["state"], "steps": replica.steps}, buffer)
    return buffer.getvalue()


@torch.no_grad()
def take_over(replica: Replica, cargo: bytes, *, at: int) -> None:
    """Go on as if this replica had taken those steps; `at` is the samples that the world had consumed at the last."""
    told = torch.load(io.BytesIO(cargo), map_location="cpu", weights_only=True)
    if not _write(replica.optimizer, told["optimizer"]):
        _replace(replica, told["optimizer"])
    replica.follow_schedule(at)
    replica.steps = told["steps"]


def _write(optimizer: torch.optim.Optimizer, told: dict[int, dict[str, Any]]) -> bool:
    """In place; whether all of it had a place already."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    pairs = [(optimizer.state.get(parameters[number], {}), entry) for number, entry in told.items()]
    if any(_shape(own) != _shape(entry) for own, entry in pairs):
        return False
    for own, entry in pairs:
        for key, value in entry.items():
            if isinstance(value, Tensor):
                own[key].copy_(value)
            else:
                own[key] = value
    return True


def _shape(state: dict[str, Any]) -> dict[str, Any]:
    return {key: (value.shape, value.dtype) if isinstance(value, Tensor) else None for key, value in state.items()}


def _replace(replica: Replica, told: dict[int, dict[str, Any]]) -> None:
    optimizer = replica.optimizer
    form = OptimizerForm(optimizer)
    optimizer.load_state_dict({"state": told, "param_groups": optimizer.state_dict()["param_groups"]})
    form.restore()
    replica.forget_captures()
