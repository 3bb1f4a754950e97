"""The replica of a user's loop: models, optimizers and schedules that the user created and steps.

Decides what happens around `optimizer.step()`: the schedule, and the scaling of the learning rate. `rank` decides when
replicas are averaged, and sets `before_step` for shared steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from outrider.average.arena import Arena
from outrider.average.arena_layout import ArenaLayout
from outrider.data import randomness
from outrider.errors import ConfigError
from outrider.replica.averaging_compensation import compensate
from outrider.replica.compiled import has_compiled_parts
from outrider.replica.finite import FiniteCheck, check_update
from outrider.replica.foreign_averages import refuse_wrapped, watch_wrapping
from outrider.replica.logged_scalars import LoggedScalars
from outrider.replica.loop_losses import LoopLosses
from outrider.replica.loop_scaler import LoopScaler, unscaled_loss
from outrider.replica.loop_state import loop_state, take_loop_state
from outrider.replica.loss_sums import LossSums, refuse_bad
from outrider.replica.other_optimizers import OtherOptimizers
from outrider.replica.portable_state import load_optimizer
from outrider.replica.recipe import LoopRecipe
from outrider.replica.schedule_ticks import ScheduleTicks, TickPer
from outrider.replica.user_factories import no_advice_on_order, refuse_closures


class LoopReplica:
    """A full copy of the user's models that the user's own loop trains."""

    has_left = False
    """Whether the user has left the pass, so that code after it may have run already."""

    def __init__(
        self,
        recipe: LoopRecipe,
        *,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[LRScheduler],
        device: torch.device,
        rank: int,
        name: str,
        scaler: GradScaler | None = None,
        per: TickPer = "optimizer-step",
    ) -> None:
        self.recipe = recipe
        self.device = device
        self.rank = rank
        self.name = name
        """The device as the user wrote it, for messages."""
        refuse_wrapped(models)
        self.models = tuple(models)
        self.optimizers = tuple(optimizers)
        self.schedulers = tuple(schedulers)
        self.model = models[0] if len(models) == 1 else nn.ModuleList(models)
        self.model.to(device)
        for scheduler in self.schedulers:
            _check_moved_by_samples(scheduler)
        _check_owned(self.model, self.optimizers)
        self.arena = Arena(self.model)
        self.finite = FiniteCheck(self.arena)
        for optimizer in self.optimizers:
            _move_state(optimizer)
        self.compensation = compensate(
            self.optimizers[0],
            policy=recipe.policy,
            outer=recipe.outer,
            lr_scale=recipe.lr_scale,
            shortest_window=recipe.anchor or recipe.min_anchor or 1,
        )
        self.rate_factor = 1.0 if recipe.lr_scale == "auto" else recipe.lr_scale
        """Factor of every learning rate: `lr_scale`, or the effective number of ranks."""
        self.steps = 0
        """Steps of the first optimizer."""
        self.ticks = 0
        self.at = 0
        """Samples of the whole world so far, for the schedule."""
        self.counts = ScheduleTicks(per)
        self.logged_scalars = LoggedScalars()
        self.loss_sums = LossSums(device)
        self.losses = LoopLosses(self.loss_sums)
        self.before_step: Callable[[torch.optim.Optimizer], None] = refuse_step
        self._rates: list[float] = []
        self._num_groups = {optimizer: len(optimizer.param_groups) for optimizer in self.optimizers}
        self._hooks = [optimizer.register_step_pre_hook(self._step_begins) for optimizer in self.optimizers]
        self._hooks += [optimizer.register_step_post_hook(self._step_ended) for optimizer in self.optimizers]
        self._hooks += watch_wrapping(self.models)
        self.other_optimizers = OtherOptimizers(self.optimizers, lambda: list(self.model.parameters()))
        for scheduler in self.schedulers:
            _take_over(scheduler)
        self.scaler = None if scaler is None else LoopScaler(scaler, device=device)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The only optimizer; for several, a view of the parameter groups and state of all."""
        return self.optimizers[0] if len(self.optimizers) == 1 else _joined(self.optimizers)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group in the next step."""
        return float(self.optimizers[0].param_groups[0]["lr"]) * self.rate_factor

    def saw_ranks(self, effective_ranks: float) -> None:
        """Set the effective number of ranks, 1/Σ w², which is equal on all ranks."""
        if self.compensation.follows_ranks:
            self.rate_factor = effective_ranks

    @property
    def can_overlap(self) -> bool:
        """Whether the all-reduce may overlap: scaled gradients must be unscaled first, accumulated ones complete.

        A parameter that is frozen for this step, as in the other half of a GAN's, gets no gradient to wait for.
        """
        return not self.scales_gradients and all(
            one.grad is None and one.requires_grad for one in self.arena.parameters
        )

    @property
    def is_compiled(self) -> bool:
        """Whether torch has compiled the model, for a fixed number of threads."""
        return any(map(has_compiled_parts, self.models))

    @property
    def scales_gradients(self) -> bool:
        return self.scaler is not None and self.scaler.is_enabled

    def lay_out(self, *, changing: Collection[str], trained: Collection[str] | None) -> None:
        """Rebuild the layout of averages after tensors were frozen or thawed."""
        self.arena = self.arena.relaid(self.model, changing=changing, trained=trained)
        self.finite = FiniteCheck(self.arena)

    def zero_gradients(self) -> None:
        for parameter in self.arena.parameters:
            parameter.grad = None

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradients of this optimizer."""
        if self.recipe.max_grad_norm is not None:
            owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(owned, self.recipe.max_grad_norm)

    def check_loss(self) -> None:
        """Raise if a loss or an update was not finite; waits for a GPU, so it is called once per window there."""
        refuse_bad(self.loss_sums.bad_steps(), self)

    def check_finite(self) -> None:
        """Raise if parameters are not finite after the last step; waits for a GPU."""
        check_update(self)

    def watch_loss(self) -> None:
        """The same as `check_loss`: the user's loop waits for its device anyway."""
        self.check_loss()

    def forget_captures(self) -> None:
        """Do nothing: a user's loop has no captured steps."""

    def _watch_update(self) -> None:
        """Raise an error if the update was not finite; on a GPU this is deferred to `check_loss`."""
        if self.device.type == "cpu":
            # The next loss that the user passes would show it.
            if not self.loss_sums.has_losses:
                self.check_finite()
        elif (probe := self.finite.probe()) is not None:
            self.loss_sums.at(self.steps - 1)
            self.loss_sums.saw_update(probe)

    # For a checkpoint

    def identity(self) -> dict[str, Any]:
        """The settings that decide which samples and steps come next; the user is responsible for batches."""
        return {
            "seed": self.recipe.seed,
            "policy": self.recipe.policy_spec.name,
            "lr_scale": self.recipe.lr_scale,
            "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
            "schedulers": [type(scheduler).__name__ for scheduler in self.schedulers],
            "grad_scaler": self.scaler is not None,
            "per": self.counts.per,
        }

    def state(self) -> dict[str, Any]:
        """The state of this rank: optimizers, schedules, random state, steps."""
        return {
            "random": randomness.saved_state(self.device),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            # The user may be accumulating gradients in the middle of a pass.
            "gradients": [parameter.grad for parameter in self.arena.parameters],
            "ticks": self.ticks,
            "counts": self.counts.state(),
            "steps": self.steps,
            "rate_factor": self.rate_factor,
            "scaler": None if self.scaler is None else self.scaler.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore all but the random state, because the user may draw random numbers before the loop continues."""
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            load_optimizer(optimizer, saved)
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        for parameter, gradient in zip(self._parameters_of(state), state["gradients"], strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        self.ticks, self.steps = state["ticks"], state["steps"]
        if state["rate_factor"] is not None:
            self.rate_factor = state["rate_factor"]
        if self.scaler is not None and state.get("scaler"):
            self.scaler.restore(state["scaler"])

    def loop_state(self) -> dict[str, Any]:
        """What the user's loop changes besides parameters and optimizer state, for a rank that rested."""
        return loop_state(self)

    def take_loop_state(self, state: dict[str, Any], *, at: int) -> None:
        """Continue as the rank that trained alone, `at` these samples of the world."""
        take_loop_state(self, state, at=at)

    def _parameters_of(self, state: dict[str, Any]) -> list[nn.Parameter]:
        """The parameters whose gradients were saved; older checkpoints include frozen parameters."""
        if "trained" in state:
            return self.arena.parameters
        layout = ArenaLayout(self.model, takes_all=True)
        tensors = [tenant.tensor for region in layout.regions for tenant in region.tenants]
        return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]

    def release(self) -> None:
        """Remove all hooks from models, optimizers and schedules."""
        self.arena.dissolve()
        for hook in self._hooks:
            hook.remove()
        self.other_optimizers.release()
        for scheduler in self.schedulers:
            _hand_back(scheduler)
        if self.scaler is not None:
            self.scaler.release()

    # Steps that the session takes for the user

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass, from the scaled loss if there is a scaler."""
        (loss if self.scaler is None else self.scaler.scaled(loss)).backward()

    def saw_loss(self, loss: torch.Tensor, samples: int) -> None:
        """Record the loss of a backward pass; on a CPU, raise if it was not finite."""
        self.losses.add(unscaled_loss(loss), samples, self.steps)
        if self.device.type == "cpu":
            self.check_loss()

    def step_alone(self, optimizer: torch.optim.Optimizer) -> None:
        """Like `step`, but raises if several optimizers share a scaler: its update would precede the other steps."""
        if self.scaler is not None and len(self.optimizers) > 1:
            raise ConfigError(
                f"{len(self.optimizers)} optimizers share one GradScaler, which is updated once after all of them",
                hint="call scaler.step(optimizer) for each, then scaler.update()",
            )
        self.step(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, through the scaler if there is one."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)

    # Hooks around every step of an optimizer, including those that the user calls.

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # The first argument of `step` is the optimizer itself.
        if any(given is not None for given in (*args[1:], *kwargs.values())):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() was given a closure, whose gradients nobody would average",
                hint="call s.backward(loss), then optimizer.step()",
            )
        if len(optimizer.param_groups) != self._num_groups[optimizer]:
            _check_owned(self.model, [optimizer])
            self._num_groups[optimizer] = len(optimizer.param_groups)
        self.other_optimizers.is_nested = True
        self.before_step(optimizer)
        self.saw_step(optimizer)
        self.follow_schedule(self.at)
        # Schedulers compute the next rate from the one in the group, so the factor must not stay there.
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self.rate_factor

    def _step_ended(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.other_optimizers.is_nested = False
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        self.steps += optimizer is self.optimizers[0]
        self._watch_update()

    def saw_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that begins or that a GradScaler skipped; only steps of the first optimizer count."""
        self.losses.saw_step()
        if optimizer is self.optimizers[0]:
            self.counts.saw_step(self.at)

    def follow_schedule(self, at: int) -> None:
        """Advance the schedule, a function of the world's samples, so that it is equal for all policies."""
        self.tick_to(self.counts.due(at))

    def tick_to(self, due: int) -> None:
        """Advance the schedule to this tick, unless it is there already."""
        # A rank that rests from the start has no step of its own before the first tick.
        with no_advice_on_order() if self.steps == 0 else nullcontext():
            while self.schedulers and self.ticks < due:
                for scheduler in self.schedulers:
                    _own_kind(scheduler).step(scheduler)
                self.ticks += 1

    def begin_epoch(self, epoch: int) -> None:
        """Count this epoch; schedules per epoch advance at once, so that the user sees its learning rate.

        Before the first step the schedule waits for it, because torch warns of schedules that advance earlier.
        """
        # A later loop over epochs counts from 0 again, the schedule goes on; a pass without a step is no epoch of it.
        self.counts.epoch = max(self.counts.epoch, epoch) if self.steps else epoch
        if self.counts.per == "epoch" and self.steps:
            self.follow_schedule(self.at)

    def go_on_from(self, ticks: int) -> None:
        """Continue at the tick at which schedules were saved; raises unless the user has loaded their states."""
        for scheduler in self.schedulers:
            if scheduler.last_epoch != ticks:
                raise ConfigError(
                    f"{type(scheduler).__name__} stands at tick {scheduler.last_epoch}, the state of the session at "
                    f"tick {ticks}",
                    hint="save scheduler.state_dict() beside s.state_dict(), and load it before s.load_state_dict()",
                )
        self.ticks = ticks


def refuse_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise for a step outside of batches(), which no other rank would share."""
    raise ConfigError(
        f"{type(optimizer).__name__}.step() was called outside of the batches() loop, where nothing is averaged",
        hint="call it inside `for batch in s.batches(dataset, batch_size=64):`",
    )


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """Move optimizer state that was loaded before the model moved to its device."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def _check_owned(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise if an optimizer has parameters of no prepared model, or computes its own gradients: neither is averaged."""
    known = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        refuse_closures(optimizer)
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
    """Make `step()` calls of the user on a prepared schedule an error, because the session advances it."""
    kind = type(scheduler)

    def refuse(*arguments: Any) -> None:
        raise ConfigError(
            f"{kind.__name__}.step() was called, but this schedule was given to prepare(), which moves it with the "
            "samples of all ranks",
            hint='delete the call; prepare(..., per="epoch") moves it once per epoch',
        )

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": refuse, "__module__": kind.__module__})


def _hand_back(scheduler: LRScheduler) -> None:
    scheduler.__class__ = _own_kind(scheduler)


def _own_kind(scheduler: LRScheduler) -> type[LRScheduler]:
    """The schedule's class before it was prepared."""
    return type(scheduler).__bases__[0]


def _joined(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    whole = torch.optim.SGD([group for optimizer in optimizers for group in optimizer.param_groups], lr=0.0)
    for optimizer in optimizers:
        whole.state.update(optimizer.state)
    return whole
