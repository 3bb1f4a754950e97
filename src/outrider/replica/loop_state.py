"""The state that a user's loop keeps outside of parameters and optimizer state, for a rank whose loop body did not run.

Decides what another rank takes over so that code after the loop sees the same there: settings of parameter groups,
frozen parameters, modes of modules, unfinished gradients, the loss scale, counts of the schedule. Called by
`LoopReplica` after one rank trained alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from outrider.average.arena import Arena
from outrider.errors import ConfigError
from outrider.replica.loop_scaler import LoopScaler
from outrider.replica.schedule_ticks import ScheduleTicks

# Parameters, and how a device computes the update; ranks may differ in that.
_NOT_TOLD = {"params", "fused", "foreach", "capturable", "differentiable"}


class _Loop(Protocol):
    """The part of a `LoopReplica` that is read and written here."""

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    arena: Arena
    scaler: LoopScaler | None
    counts: ScheduleTicks
    ticks: int
    at: int
    has_left: bool

    def tick_to(self, due: int) -> None: ...


def loop_state(replica: _Loop) -> dict[str, Any]:
    """The state to send, as numbers, text and tensors."""
    return {
        # Code after the loop runs on every rank: what it set is not taken over, or ranks would set it twice.
        "settings": None if replica.has_left else settings_of(replica.optimizers),
        "trained": [parameter.requires_grad for parameter in replica.model.parameters()],
        "training": [module.training for module in replica.model.modules()],
        "ticks": replica.ticks,
        "counts": replica.counts.state() | {"since_step": replica.counts.per_step.since_step()},
        "scaler": None if replica.scaler is None else replica.scaler.state(),
        "gradients": _unfinished_gradients(replica),
    }


def take_loop_state(replica: _Loop, state: dict[str, Any], *, at: int) -> None:
    """Continue with the received state, `at` these samples of the world."""
    replica.counts.restore(state["counts"])
    replica.counts.per_step.continue_from(state["counts"]["since_step"])
    # Schedules compute a rate from the one before, so they advance before this rank takes over the rates.
    replica.tick_to(state["ticks"])
    replica.at = at
    if state["settings"] is not None:
        _set(replica.optimizers, state["settings"])
    for parameter, is_trained in zip(replica.model.parameters(), state["trained"], strict=True):
        if parameter.requires_grad != is_trained:
            parameter.requires_grad_(is_trained)
    for module, is_training in zip(replica.model.modules(), state["training"], strict=True):
        module.training = is_training
    if replica.scaler is not None and state["scaler"]:
        replica.scaler.restore(state["scaler"])
    _continue_gradients(replica, state["gradients"])


def settings_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[dict[str, Any]]]:
    """Numbers and text of the parameter groups: rates, momenta, weight decay, whatever a loop may change."""
    return [[_settings(group) for group in optimizer.param_groups] for optimizer in optimizers]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    told = {key: _plain(value) for key, value in group.items() if key not in _NOT_TOLD}
    return {key: value for key, value in told.items() if value is not None}


def _plain(value: Any) -> Any:
    """A number, a text or a tuple of them as Python knows it; None for anything else."""
    if isinstance(value, Tensor | np.generic):
        return value.item() if np.prod(value.shape) == 1 else None
    if isinstance(value, list | tuple):
        parts = tuple(_plain(part) for part in value)
        return None if None in parts else parts
    return value if isinstance(value, int | float | str) else None


def refuse_other_groups(optimizers: Sequence[torch.optim.Optimizer], state: dict[str, Any]) -> None:
    """Raise if the loop of the other rank added parameter groups meanwhile: their parameters are not known here."""
    if state.get("settings") is None:
        return
    for optimizer, groups in zip(optimizers, state["settings"], strict=True):
        if len(groups) != len(optimizer.param_groups):
            raise ConfigError(
                f"{type(optimizer).__name__} has {len(groups)} parameter groups on the rank that trained alone, "
                f"{len(optimizer.param_groups)} on a rank that rested: add_param_group() was called inside the loop",
                hint='call it between two loops over batches(), or pass policy="balanced"',
            )


def _set(optimizers: Sequence[torch.optim.Optimizer], told: list[list[dict[str, Any]]]) -> None:
    for optimizer, groups in zip(optimizers, told, strict=True):
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            for key, value in settings.items():
                _set_one(group, key, value)


def _set_one(group: dict[str, Any], key: str, value: Any) -> None:
    own = group.get(key)
    if isinstance(own, Tensor):
        own.fill_(value)
    elif isinstance(own, list | tuple):
        if any(isinstance(part, Tensor) for part in own):
            for part, number in zip(own, value, strict=True):
                part.fill_(number)
        else:
            group[key] = type(own)(value)
    else:
        group[key] = value


def _unfinished_gradients(replica: _Loop) -> dict[int, Tensor]:
    """Gradients by the number of their parameter: the user may be accumulating them."""
    parameters = enumerate(replica.arena.parameters)
    return {number: one.grad for number, one in parameters if one.grad is not None and not one.grad.is_sparse}


def _continue_gradients(replica: _Loop, told: dict[int, Tensor]) -> None:
    """Take over unfinished gradients.

    This rank's own are in steps that it has received if it rested; after local steps they are dropped.
    """
    for number, parameter in enumerate(replica.arena.parameters):
        parameter.grad = told[number].to(parameter.device) if number in told else None
