"""A replica whose steps the user takes: models, optimizers and schedules that the user made.

Decides what happens around `optimizer.step()`: the schedule, and the rate that makes up for averaging. When replicas
are averaged, and what comes before a step that is shared, is the user loop's business, which sets `before_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from outrider.average.arena import Arena
from outrider.errors import ConfigError
from outrider.replica.compensation import compensate
from outrider.replica.logbook import Logbook
from outrider.replica.recipe import Recipe
from outrider.replica.tally import LossTally, refuse_bad


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
        for scheduler in self.schedulers:
            _check_moved_by_samples(scheduler)
        _check_owned(self.model, self.optimizers)
        self.arena = Arena(self.model)
        for optimizer in self.optimizers:
            _move_state(optimizer)
        self.compensation = compensate(
            self.optimizers[0], policy=recipe.policy, outer=recipe.outer, lr_scale=recipe.lr_scale
        )
        self.rate_factor = 1.0 if recipe.lr_scale == "auto" else recipe.lr_scale
        """On every learning rate: what was asked for, or the effective number of ranks."""
        self.steps = 0
        """Steps of the first optimizer."""
        self.ticks = 0
        self.at = 0
        """Samples that the whole world has consumed, for the schedule."""
        self._batch_size = 1
        self._ticks_before = self._ticking_since = 0
        self.logbook = Logbook()
        self.tally = LossTally(device)
        self.before_step: Callable[[torch.optim.Optimizer], None] = refuse_step
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

    def tick_every(self, batch_size: int, *, since: int) -> None:
        """Schedules tick once per so many samples; where that changes, only from these samples of the world on."""
        if batch_size != self._batch_size:
            self._ticks_before += (since - self._ticking_since) // self._batch_size
            self._ticking_since, self._batch_size = since, batch_size

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
        refuse_bad(self.tally.bad_step(), rank=self.rank, name=self.name)

    def release(self) -> None:
        """Models, optimizers and schedules are the user's alone again."""
        self.arena.dissolve()
        for hook in self._hooks:
            hook.remove()
        for scheduler in self.schedulers:
            _hand_back(scheduler)

    # Around every step of an optimizer, also one that the user calls.

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # The arguments of `step` begin with the optimizer itself.
        if len(args) > 1 or kwargs:
            raise ConfigError(
                f"{type(optimizer).__name__}.step() was given a closure, whose gradients nobody would average",
                hint="call s.backward(loss), then optimizer.step()",
            )
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
        due = self._ticks_before + (self.at - self._ticking_since) // self._batch_size
        while self.schedulers and self.ticks < due:
            for scheduler in self.schedulers:
                _own_kind(scheduler).step(scheduler)
            self.ticks += 1


def refuse_step(optimizer: torch.optim.Optimizer) -> None:
    """No batch is in hand, so no other rank takes this step."""
    raise ConfigError(
        f"{type(optimizer).__name__}.step() was called outside of the batches() loop, where nothing is averaged",
        hint="call it inside `for batch in s.batches(dataset, batch_size=64):`",
    )


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """State that was loaded before the model moved follows it to its device."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


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


def _check_moved_by_samples(scheduler: LRScheduler) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau follows a measured value, and a schedule given to prepare() moves with the samples",
            hint="leave it out of prepare(), and on every rank call scheduler.step(s.evaluate_together(...))",
        )


def _take_over(scheduler: LRScheduler) -> None:
    """The session moves a prepared schedule; a second hand would move it twice. Its state is what it was."""
    kind = type(scheduler)

    def refuse(*arguments: Any) -> None:
        raise ConfigError(
            f"{kind.__name__}.step() was called, but this schedule was given to prepare(), which moves it with the "
            "samples of all ranks",
            hint="delete the call, or leave the schedule out of prepare() and step it once per epoch",
        )

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": refuse, "__module__": kind.__module__})


def _hand_back(scheduler: LRScheduler) -> None:
    scheduler.__class__ = _own_kind(scheduler)


def _own_kind(scheduler: LRScheduler) -> type[LRScheduler]:
    """What it was before it was taken over."""
    return type(scheduler).__bases__[0]


def _joined(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    whole = torch.optim.SGD([group for optimizer in optimizers for group in optimizer.param_groups], lr=0.0)
    for optimizer in optimizers:
        whole.state.update(optimizer.state)
    return whole
