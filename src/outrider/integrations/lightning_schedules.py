"""Learning-rate schedules per step in a Trainer whose ranks take unequal numbers of steps.

Decides who moves them: the steps of all ranks together, not those of one rank. Schedules per epoch stay Lightning's.
Called by `OutriderStrategy`, for policies of local steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch.optim.lr_scheduler import LRScheduler

from outrider.errors import ConfigError

_MARK = "_outrider_follows"


def follow_world(configs: Sequence[Any], module: pl.LightningModule, epochs: Any) -> Callable[[int], None]:
    """Take over the schedules; returns the function that moves those per step to a step of the world."""
    if not module.automatic_optimization:
        for config in configs:
            _take_over(config.scheduler, partial(_refuse_inside, config.scheduler, epochs))
        return lambda steps: None
    followed = [config for config in configs if config.interval == "step" and not config.reduce_on_plateau]
    followed = [config for config in followed if isinstance(config.scheduler, LRScheduler)]
    kinds = [_take_over(config.scheduler, lambda: False) for config in followed]

    def move(steps: int) -> None:
        for config, kind in zip(followed, kinds, strict=True):
            while config.scheduler.last_epoch < steps // config.frequency:
                kind.step(config.scheduler)

    return move


def let_go(configs: Sequence[Any]) -> None:
    """Give the schedules back as they were."""
    for config in configs:
        kind = type(config.scheduler)
        if getattr(kind, _MARK, False):
            config.scheduler.__class__ = kind.__bases__[0]


def _take_over(scheduler: Any, may_step: Callable[[], bool]) -> Any:
    """Put `may_step` before `step()`; the class as it was is returned."""
    kind = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        if may_step():
            kind.step(self, *args, **kwargs)

    members = {"step": step, "__module__": kind.__module__, _MARK: True}
    scheduler.__class__ = type(kind.__name__, (kind,), members)
    return kind


def _refuse_inside(scheduler: Any, epochs: Any) -> bool:
    if epochs.is_in_pass:
        raise ConfigError(
            f"{type(scheduler).__name__}.step() in training_step counts the steps of this rank alone, and ranks take "
            "different numbers of them",
            hint="call it in on_train_epoch_end, set the rate from self.trainer.global_step, or pass "
            'policy="balanced" or "sync"',
        )
    return True
