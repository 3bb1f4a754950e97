"""Sorts the arguments of `prepare()` into models, optimizers, schedules and a GradScaler.

Decides which kinds of objects are accepted. Used by the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from outrider.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Things:
    """The prepared objects by kind, each in the order of the arguments."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: tuple[LRScheduler, ...]
    scaler: GradScaler | None


def sort_out(given: Sequence[Any]) -> Things:
    """Sort the arguments; requires at least one model and one optimizer, and no other kinds."""
    for thing in given:
        if not isinstance(thing, nn.Module | torch.optim.Optimizer | LRScheduler | GradScaler):
            raise ConfigError(
                f"prepare() takes models, optimizers, schedules and a GradScaler, got {type(thing).__name__}",
                hint=_way_out(thing),
            )
    things = Things(
        models=tuple(thing for thing in given if isinstance(thing, nn.Module)),
        optimizers=tuple(thing for thing in given if isinstance(thing, torch.optim.Optimizer)),
        schedulers=tuple(thing for thing in given if isinstance(thing, LRScheduler)),
        scaler=_only_scaler([thing for thing in given if isinstance(thing, GradScaler)]),
    )
    if not things.models or not things.optimizers:
        missing = "a model" if not things.models else "an optimizer"
        raise ConfigError(f"prepare() needs {missing}", hint="call model, optimizer = s.prepare(model, optimizer)")
    return things


def _way_out(thing: object) -> str:
    if callable(getattr(thing, "step_update", None)):
        return "leave it out and call scheduler.step_update(s.global_step) before each step, on every rank"
    return "data sets and data loaders go to batches()"


def _only_scaler(scalers: Sequence[GradScaler]) -> GradScaler | None:
    if len(scalers) > 1:
        raise ConfigError(
            f"prepare() takes one GradScaler, got {len(scalers)}", hint="use one scaler for all models and optimizers"
        )
    return scalers[0] if scalers else None
