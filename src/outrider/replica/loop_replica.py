"""A replica whose steps the user takes: models, optimizers and schedules that the user made.

Decides what happens around `optimizer.step()`: the schedule, and the rate that makes up for averaging. When replicas
are averaged, and what comes before a step that is shared, is the user loop's business, which sets `before_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from outrider.average.arena import Arena
from outrider.errors import ConfigError, StepError
from outrider.replica.compensation import compensate
from outrider.replica.logbook import Logbook
from outrider.replica.recipe import Recipe
from outrider.replica.tally import LossTally


class LoopReplica:
    """A full copy of the user's models that the user's own loop trains."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[LRScheduler],
        device: torch.device,
        rank: int,
        name: str,
    ) -> None:
        self.recipe = recipe
        self.device = device
        self.rank = rank
        self.name = name
        """The device as the user wrote it, for messages."""
        self.models = tuple(models)
        self.optimizers = tuple(optimizers)
        self.schedulers = tuple(schedulers)
        self.model = models[0] if len(models) == 1 else nn.ModuleList(models)
        self.model.to(device)
        _check_owned(self.model, self.optimizers)
        self.arena = Arena(self.model)
        _scale_rates(self.optimizers, recipe)
        self.compensation = compensate(
            self.optimizers[0], policy=recipe.policy, outer=recipe.outer, lr_scale=recipe.lr_scale
        )
        self.rate_factor = 1.0
        self.steps = 0
        """Steps of the first optimizer."""
        self.ticks = 0
        self.at = 0
        """Samples that the whole world has consumed, for the schedule."""
        self.batch_size = 1
        self.logbook = Logbook()
        self.tally = LossTally(device)
        self.before_step: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
        self._rates: list[float] = []
        self._hooks = [optimizer.register_step_pre_hook(self._step_begins) for optimizer in self.optimizers]
        self._hooks += [optimizer.register_step_post_hook(self._step_ended) for optimizer in self.optimizers]
        for scheduler in self.schedulers:
            _take_over(scheduler)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The only optimizer; for several, one that shows the parameter groups and the state of all."""
        return self.optimizers[0] if len(self.optimizers) == 1 else _joined(self.optimizers)

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group, as the next step uses it."""
        return float(self.optimizers[0].param_groups[0]["lr"]) * self.rate_factor

    def saw_ranks(self, effective_ranks: float) -> None:
        """How many equal ranks would share the samples as unequally as these do; the same on all ranks."""
        if self.compensation.follows_ranks:
            self.rate_factor = effective_ranks

    def zero_gradients(self) -> None:
        for parameter in self.arena.parameters:
            parameter.grad = None

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip what this optimizer is about to use."""
        if self.recipe.max_grad_norm is not None:
            owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(owned, self.recipe.max_grad_norm)

    def check_loss(self) -> None:
        """Raise if a loss since the start was not finite; waits for a GPU, so it is called once per window there."""
        step = self.tally.bad_step()
        if step is not None:
            raise StepError(
                f"rank {self.rank} ({self.name}), step {step}: the loss is not finite",
                hint="lower the learning rate, or set max_grad_norm",
                rank=self.rank,
                step=step,
            )

    def release(self) -> None:
        """Models, optimizers and schedules are the user's alone again."""
        self.arena.dissolve()
        for hook in self._hooks:
            hook.remove()
        for scheduler in self.schedulers:
            _hand_back(scheduler)

    # Around every step of an optimizer, also one that the user calls.

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.before_step(optimizer)
        self._follow_schedule()
        # Schedulers compute the next rate from the one in the group, so the factor must not stay there.
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self.rate_factor

    def _step_ended(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        self.steps += optimizer is self.optimizers[0]

    def _follow_schedule(self) -> None:
        """The schedule is a function of the world's samples, so every policy and every solo sees the same one."""
        due = self.at // self.batch_size
        while self.schedulers and self.ticks < due:
            for scheduler in self.schedulers:
                type(scheduler).step(scheduler)
            self.ticks += 1


def _scale_rates(optimizers: Sequence[torch.optim.Optimizer], recipe: Recipe) -> None:
    if recipe.lr_scale == "auto":
        return
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] *= recipe.lr_scale


def _check_owned(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """A parameter that an optimizer moves and nobody averages would drift apart without a sign."""
    known = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        if strangers:
            raise ConfigError(
                f"{type(optimizer).__name__} trains {len(strangers)} parameters of no model given to prepare(), "
                f"the first of shape {tuple(strangers[0].shape)}",
                hint="hand all models and their optimizers to one call of prepare()",
            )


def _take_over(scheduler: LRScheduler) -> None:
    """The session moves a prepared schedule; a second hand would move it twice."""
    name = type(scheduler).__name__

    def refuse(*arguments: Any) -> None:
        raise ConfigError(
            f"{name}.step() was called, but this schedule was given to prepare(), which moves it with the samples "
            "of all ranks",
            hint="delete the call, or leave the schedule out of prepare() and step it once per epoch",
        )

    scheduler.step = refuse  # type: ignore[method-assign]


def _hand_back(scheduler: LRScheduler) -> None:
    vars(scheduler).pop("step", None)


def _joined(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    whole = torch.optim.SGD([group for optimizer in optimizers for group in optimizer.param_groups], lr=0.0)
    for optimizer in optimizers:
        whole.state.update(optimizer.state)
    return whole
