"""One replica: model, optimizer and schedule on one device, and its step.

Decides how a step runs: eagerly, or by `CapturedSteps`. The policy decides which samples it takes and when replicas are
averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from outrider.average.arena import Arena
from outrider.data import randomness
from outrider.data.packed_batch import as_packed_batch, unpacked
from outrider.errors import OutriderError, StepError, named
from outrider.policy.effects import Decision
from outrider.replica.averaging_compensation import compensate
from outrider.replica.capture import FasterSteps, Overlapped
from outrider.replica.compiled import CompiledStep, has_compiled_parts, is_compiled_function
from outrider.replica.evaluation_mode import evaluating
from outrider.replica.finite import FiniteCheck, check_update, gradient_not_finite
from outrider.replica.gradient_accumulation import pieces
from outrider.replica.logged_scalars import LoggedScalars, PendingScalars, writing
from outrider.replica.loss_scale import LossScale
from outrider.replica.loss_sums import LossSums, refuse_bad
from outrider.replica.micro_batches import MicroBatches, limit_of
from outrider.replica.portable_state import load_optimizer
from outrider.replica.precision import choose_precision
from outrider.replica.recipe import Recipe, StepFunction
from outrider.replica.retaken_step import RetakenSteps
from outrider.replica.run_identity import identity_of
from outrider.replica.tuning import autocast, fuse_optimizer, set_tf32, to_channels_last
from outrider.replica.user_factories import make_model, make_optimizer, make_scheduler, no_advice_on_order


class Replica:
    """A full copy of the model that can take steps."""

    def __init__(self, recipe: Recipe, *, device: torch.device, rank: int, name: str) -> None:
        self.recipe = recipe
        self.device = device
        self.rank = rank
        self.name = name
        """The device as the user wrote it, for messages."""
        randomness.seed_run(recipe.seed)
        self.model = make_model(recipe).to(device)
        self.model.train()
        self.arena = Arena(self.model)
        self.finite = FiniteCheck(self.arena)
        self.optimizer = make_optimizer(recipe, self.model)
        fuse_optimizer(self.optimizer, recipe, device)
        set_tf32(recipe, device)
        self.scheduler = make_scheduler(recipe, self.optimizer)
        self.compensation = compensate(
            self.optimizer,
            policy=recipe.policy,
            outer=recipe.outer,
            lr_scale=recipe.lr_scale,
            shortest_window=recipe.anchor or recipe.min_anchor or 1,
        )
        self.rate_factor = 1.0
        """Factor of the learning rate: the effective number of ranks if the compensation uses it."""
        randomness.seed_rank(recipe.seed, rank)
        self.ticks = 0
        self.steps = 0
        self._num_skipped = 0
        self.logged_scalars = LoggedScalars()
        self.loss_sums = LossSums(device)
        self.batch_size = recipe.own_batch_size(rank, batch_size=recipe.mean_batch_size)
        self.micro_batches = MicroBatches(
            limit=limit_of(recipe.micro_batch, rank), accumulate=recipe.accumulate, batch_size=self.batch_size
        )
        self.precision_choice = choose_precision(recipe.precision, rank=rank, device=device, name=name)
        self.precision = self.precision_choice.value
        self.loss_scale = LossScale() if self.precision == "fp16" else None
        self.on_loss_scale: Callable[[Decision], None] = lambda decision: None
        """Called when a step was skipped because this rank's gradient overflowed."""
        self.on_micro_batch: Callable[[Decision], None] = lambda decision: None
        """Called when memory ran out and micro-batches became smaller."""
        self._retaken = RetakenSteps(
            self, on_shrink=lambda decision: self.on_micro_batch(decision), batch_sampler=recipe.batch_sampler
        )
        self.captured: FasterSteps | None = None
        """Runs the steps if they are CUDA graphs."""
        self.compiled: CompiledStep | None = None

    @property
    def num_warm_ups(self) -> int:
        """Counts steps that do not measure speed: they captured or warmed up something, or were taken twice."""
        return self._retaken.num_retaken + (0 if self.captured is None else self.captured.num_warm_ups)

    def use_channels_last(self) -> None:
        """Change the memory format of convolutions; call it before the layout of the arena is used."""
        to_channels_last(self.model)
        self.arena = Arena(self.model)
        self.finite = FiniteCheck(self.arena)

    def lay_out(self, *, changing: Collection[str], trained: Collection[str] | None) -> None:
        """Rebuild the layout of averages after tensors were frozen or thawed."""
        self.arena = self.arena.relaid(self.model, changing=changing, trained=trained)
        self.finite = FiniteCheck(self.arena)
        self.forget_captures()

    # A local step: gradient, clip, optimizer. `data` is a batch, or the packed batch of one.

    def step(self, data: Any, *, samples: int, at: int) -> None:
        """Forward, backward and optimizer on one batch; `at` is the number of samples of the whole world so far."""
        if self.captured is None:
            self.plain_step(unpacked(data), samples=samples, at=at)
        else:
            self.captured.step(as_packed_batch(data), samples=samples, at=at)

    def gradient(self, data: Any, *, samples: int, overlapped: Overlapped | None = None) -> None:
        """Forward and backward; afterwards every used parameter holds its gradient.

        `overlapped` is entered around the last backward pass, so that the all-reduce may begin before it ends. This
        saves more than a capture, whose gradients are complete only at its end. So such a gradient is computed eagerly.
        """
        if self.captured is None:
            self.plain_gradient(unpacked(data), samples=samples, overlapped=overlapped or nullcontext)
        elif overlapped is None:
            self.captured.gradient(as_packed_batch(data), samples=samples)
        else:
            self.captured.eager_gradient(as_packed_batch(data), samples=samples, overlapped=overlapped)

    def no_gradient(self) -> None:
        """Take part in a shared step without samples."""
        if self.loss_scale is not None:
            self.loss_scale.unscale([])
        self.optimizer.zero_grad(set_to_none=True)

    def update(self, *, at: int) -> None:
        """The optimizer's step at the learning rate for position `at`."""
        if self.captured is None:
            self.plain_update(at=at)
        else:
            self.captured.update(at=at)

    # Eager steps.

    def plain_step(self, batch: Any, *, samples: int, at: int) -> None:
        self.plain_gradient(batch, samples=samples)
        if self.loss_scale is not None and self.loss_scale.has_overflow:
            self.skip_update(at=at)
            return
        self.plain_update(at=at)
        self.watch_update()

    def plain_gradient(self, batch: Any, *, samples: int, overlapped: Overlapped = nullcontext) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        compute = partial(self.compute_gradient, batch, samples=samples, overlapped=overlapped)
        self._retaken.run(compute, samples=samples)
        if self.loss_scale is not None:
            self.loss_scale.unscale([one.grad for one in self.arena.parameters if one.grad is not None])
        if self.device.type == "cpu":
            self.check_loss()

    def compute_gradient(self, batch: Any, *, samples: int, overlapped: Overlapped = nullcontext) -> None:
        """Forward and backward, without waiting for the device."""
        try:
            self._backward(batch, samples, overlapped)
        except OutriderError:
            raise
        except Exception as error:
            raise self._step_error(error) from error

    def clip(self) -> None:
        """Clip gradients in the update, so that a shared step clips that of the whole batch, as one device does."""
        if self.recipe.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.arena.parameters, self.recipe.max_grad_norm)

    def plain_update(self, *, at: int) -> None:
        self.follow_schedule(at)
        try:
            self.clip()
            self.optimizer_step()
        except Exception as error:
            raise self._step_error(error, " in the optimizer") from error
        self.steps += 1
        if self.loss_scale is not None:
            self.loss_scale.took_step()

    def skip_update(self, *, at: int) -> None:
        """Leave parameters and optimizer unchanged, because a gradient overflowed on this or another rank."""
        self.follow_schedule(at)
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self._num_skipped += 1
        scale = self.loss_scale
        if scale is None:
            return
        if scale.is_hopeless:
            raise gradient_not_finite(rank=self.rank, name=self.name, step=self.steps - 1)
        scale.skipped_step()
        if scale.has_overflow:
            self.on_loss_scale(Decision("loss scale", scale.value, f"the gradient of step {self.steps - 1} overflowed"))

    def saw_ranks(self, effective_ranks: float) -> None:
        """Set the effective number of ranks, 1/Σ w², which is equal on all ranks."""
        if self.compensation.follows_ranks:
            self.rate_factor = effective_ranks

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group in the next step."""
        return float(self.optimizer.param_groups[0]["lr"]) * self.rate_factor

    def optimizer_step(self) -> None:
        if self.rate_factor == 1.0:
            self.optimizer.step()
            return
        # Schedulers compute the next rate from the one in the group, so the factor must not stay there.
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * self.rate_factor
        self.optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _backward(self, data: Any, samples: int, overlapped: Overlapped) -> None:
        counts = self.micro_batches.counts(samples)
        losses: list[tuple[torch.Tensor, int]] = []
        scalars = PendingScalars()
        for piece, count in pieces(data, counts):
            is_last = len(losses) == len(counts) - 1
            with overlapped() if is_last else nullcontext():
                loss = self._loss(piece, count, scalars)
                part = loss if count == samples else loss * (count / samples)
                (part if self.loss_scale is None else self.loss_scale.scaled(part)).backward()
            losses.append((loss.detach(), count))
        # Added only now: if a micro-batch runs out of memory, the whole batch is repeated.
        for loss, count in losses:
            self.loss_sums.add(loss, count, self.steps)
        scalars.count_in(self.logged_scalars)

    def _loss(self, data: Any, samples: int, scalars: PendingScalars) -> torch.Tensor:
        with writing(scalars, samples=samples), self.autocast():
            loss = self._step_function(samples)(self.model, data)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise self._bad_result(
                f"the step function must return a scalar loss, got {_describe(loss)}",
                hint="return the mean loss of the batch, a tensor with one element",
            )
        if not loss.requires_grad:
            raise self._bad_result(
                "the loss that the step function returned has no gradient",
                hint="return the loss itself, computed from the model's output, without detach() or no_grad()",
            )
        return loss

    def _step_function(self, samples: int) -> StepFunction:
        return self.recipe.step if self.compiled is None else self.compiled.for_samples(samples)

    def _bad_result(self, trouble: str, *, hint: str) -> StepError:
        message = f"rank {self.rank} ({self.name}), step {self.steps}: {trouble}"
        return StepError(message, hint=hint, rank=self.rank, step=self.steps)

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.precision, self.device)

    def watch_update(self) -> None:
        """Record on a GPU whether the update was finite; on a CPU the next loss shows it."""
        if self.device.type != "cpu":
            self.loss_sums.at(self.steps - 1)
            self.mark_update()

    def mark_update(self) -> None:
        """Record whether the update of the current step was finite, without waiting; part of a captured step."""
        probe = self.finite.probe()
        if probe is not None:
            self.loss_sums.saw_update(probe)

    def check_finite(self) -> None:
        """Raise if parameters are not finite after the last step; waits for a GPU."""
        check_update(self)

    def check_loss(self) -> None:
        """Raise if a loss or an update since the start was not finite; waits for a GPU."""
        refuse_bad(self.loss_sums.bad_steps(), self)

    def watch_loss(self) -> None:
        """Like `check_loss`, but without waiting: on a GPU it checks the losses up to the previous call."""
        refuse_bad(self.loss_sums.bad_steps_so_far(), self)

    def loop_state(self) -> dict[str, Any]:
        """Nothing: there is no loop of the user's own."""
        return {}

    def take_loop_state(self, state: dict[str, Any], *, at: int) -> None:
        """Continue as the rank that trained alone, `at` these samples of the world."""
        self.follow_schedule(at)

    def follow_schedule(self, at: int) -> None:
        """Advance the schedule, a function of the world's samples, so that it is equal for all policies."""
        if self.scheduler is None:
            return
        due = at // self.recipe.mean_batch_size
        try:
            with no_advice_on_order() if self.steps == self._num_skipped else nullcontext():
                while self.ticks < due:
                    self.scheduler.step()
                    self.ticks += 1
        except Exception as error:
            raise self._step_error(error, f" in the scheduler, tick {self.ticks + 1}") from error

    def _step_error(self, error: Exception, where: str = "") -> StepError:
        return StepError(
            f"rank {self.rank} ({self.name}), step {self.steps}{where}: {named(error)}",
            rank=self.rank,
            step=self.steps,
        )

    def evaluate(self, data: Any) -> float:
        """The user's evaluation of one batch, in evaluation mode."""
        assert self.recipe.evaluate is not None
        # Not a decorator, because its frame would show up in the tracebacks of errors.
        with torch.no_grad(), evaluating([self.model]), self.autocast():
            value = self.call_user("evaluate", self.recipe.evaluate, self.model, data)
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            return float(value)
        raise self._bad_result(
            f"evaluate must return a number, got {_describe(value)}", hint="return the mean over the batch"
        )

    def call_user(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a user function other than the step; its exception names rank and step."""
        try:
            return function(*arguments)
        except OutriderError:
            raise
        except Exception as error:
            raise self._step_error(error, f" in {what}") from error

    # Checkpoints

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return (self.optimizer,)

    @property
    def is_compiled(self) -> bool:
        """Whether torch has compiled the model or the step, for a fixed number of threads."""
        is_asked = self.recipe.execution == "compile"
        return is_asked or is_compiled_function(self.recipe.step) or has_compiled_parts(self.model)

    @property
    def can_overlap(self) -> bool:
        """Whether the all-reduce may overlap: an eager backward pass completes gradients, which then stay unchanged.

        A parameter that is frozen for a while gets none.
        """
        is_eager = self.captured is None or self.recipe.execution == "auto"
        is_whole = all(parameter.requires_grad for parameter in self.arena.parameters)
        return is_eager and is_whole and self.compiled is None and self.loss_scale is None

    def identity(self) -> dict[str, Any]:
        """The settings that decide which samples and steps come next, for a checkpoint."""
        return identity_of(self.recipe) | {
            "optimizer": type(self.optimizer).__name__,
            "scheduler": type(self.scheduler).__name__ if self.scheduler else None,
        }

    def state(self) -> dict[str, Any]:
        """The state of this rank: optimizer, schedule, random state, steps."""
        return {
            "random": randomness.saved_state(self.device),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "ticks": self.ticks,
            "steps": self.steps,
            "rate_factor": self.rate_factor,
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state(),
            "micro_batch": {"device": self.name, "limit": self.micro_batches.limit},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state; if its "random" is None, as for a new rank, this rank uses its own random state."""
        load_optimizer(self.optimizer, state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.ticks, self.steps = state["ticks"], state["steps"]
        if state["rate_factor"] is not None:
            self.rate_factor = state["rate_factor"]
        if state["random"] is not None:
            randomness.restore_saved(self.device, state["random"])
        if self.loss_scale is not None and state.get("loss_scale") is not None:
            self.loss_scale.restore(state["loss_scale"])
        self._restore_micro_batch(state.get("micro_batch"))
        self.forget_captures()

    def _restore_micro_batch(self, saved: dict[str, Any] | None) -> None:
        """Use the size that fitted this device before, unless the user gives one; older checkpoints have none."""
        if saved is not None and saved["device"] == self.name and self.micro_batches.limit is None:
            self.micro_batches.limit = saved["limit"]

    def forget_captures(self) -> None:
        """Drop captured steps after a change of the tensors whose addresses they contain."""
        if self.captured is not None:
            self.captured.forget()

    def give_up_captures(self, reason: str) -> bool:
        """Free the memory of captured steps and run eagerly from now on; False if none were captured."""
        return self.captured is not None and self.captured.give_up(reason)

    def resize_compiled(self, samples: int) -> None:
        """Compile the step for micro-batches of another size."""
        if self.compiled is not None:
            self.compiled.resize(samples)


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__
