"""Tells apart what the user hands to `prepare()`: models, optimizers, schedules.

Decides what belongs there and what does not. Used by the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from outrider.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Things:
    """What is to be trained, by kind, each in the order it came."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: tuple[LRScheduler, ...]


def sort_out(given: Sequence[Any]) -> Things:
    """At least one model and one optimizer, and nothing of another kind."""
    for thing in given:
        if not isinstance(thing, nn.Module | torch.optim.Optimizer | LRScheduler):
            raise ConfigError(
                f"prepare() takes models, optimizers and schedules, got {type(thing).__name__}",
                hint="data sets and data loaders go to batches()",
            )
    things = Things(
        models=tuple(thing for thing in given if isinstance(thing, nn.Module)),
        optimizers=tuple(thing for thing in given if isinstance(thing, torch.optim.Optimizer)),
        schedulers=tuple(thing for thing in given if isinstance(thing, LRScheduler)),
    )
    if not things.models or not things.optimizers:
        missing = "a model" if not things.models else "an optimizer"
        raise ConfigError(f"prepare() needs {missing}", hint="call model, optimizer = s.prepare(model, optimizer)")
    return things
