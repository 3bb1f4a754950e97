"""One replica: model, optimizer and schedule on one device, and its step.

Decides how a step runs: eagerly, or by `CapturedSteps`. Which samples it takes and when replicas are averaged is the
policy's business.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from outrider.average.arena import Arena
from outrider.data.parcel import as_parcel, unpacked
from outrider.errors import ConfigError, OutriderError, StepError, named
from outrider.replica.captured import CapturedSteps
from outrider.replica.compensation import compensate
from outrider.replica.compiled import CompiledStep
from outrider.replica.logbook import Logbook, writing
from outrider.replica.modes import evaluating
from outrider.replica.pieces import pieces
from outrider.replica.randomness import random_state, restore_random
from outrider.replica.rates import OptimizerForm
from outrider.replica.recipe import Recipe, StepFunction
from outrider.replica.tally import LossTally, refuse_bad
from outrider.replica.tuning import autocast, fuse_optimizer, set_tf32, to_channels_last


class Replica:
    """A full copy of the model that can take steps."""

    def __init__(self, recipe: Recipe, *, device: torch.device, rank: int, name: str) -> None:
        self.recipe = recipe
        self.device = device
        self.rank = rank
        self.name = name
        """The device as the user wrote it, for messages."""
        torch.manual_seed(recipe.seed)
        self.model = _make_model(recipe).to(device)
        self.model.train()
        self.arena = Arena(self.model)
        self.optimizer = _make_optimizer(recipe, self.model)
        fuse_optimizer(self.optimizer, recipe, device)
        set_tf32(recipe, device)
        self.scheduler = _make_scheduler(recipe, self.optimizer)
        self.compensation = compensate(
            self.optimizer, policy=recipe.policy, outer=recipe.outer, lr_scale=recipe.lr_scale
        )
        self.rate_factor = 1.0
        """On the learning rate: the effective number of ranks where the compensation follows it."""
        # Rank 0 draws as a plain loop would; the others need their own dropout.
        if rank > 0:
            torch.manual_seed(recipe.seed * 1_000_003 + rank)
        self.ticks = 0
        self.steps = 0
        self.logbook = Logbook()
        self.tally = LossTally(device)
        self.captured: CapturedSteps | None = None
        """Takes the steps where they are CUDA graphs."""
        self.compiled: CompiledStep | None = None

    @property
    def num_warm_ups(self) -> int:
        """Grows with every step that says nothing about speed, since something new to the device was captured in it."""
        return 0 if self.captured is None else self.captured.num_warm_ups

    def use_channels_last(self) -> None:
        """Lay the weights of convolutions out anew; before anybody has learned the arena's layout."""
        to_channels_last(self.model)
        self.arena = Arena(self.model)

    # A local step: gradient, clip, optimizer. `data` is a batch, or the parcel of one.

    def step(self, data: Any, *, samples: int, at: int) -> None:
        """Forward, backward and optimizer on one batch; `at` is the samples the whole world has consumed."""
        if self.captured is None:
            self.plain_step(unpacked(data), samples=samples, at=at)
        else:
            self.captured.step(as_parcel(data), samples=samples, at=at)

    def gradient(self, data: Any, *, samples: int) -> None:
        """Forward, backward and clipping; afterwards every used parameter holds its gradient."""
        if self.captured is None:
            self.plain_gradient(unpacked(data), samples=samples)
        else:
            self.captured.gradient(as_parcel(data), samples=samples)

    def no_gradient(self) -> None:
        """Take part in a shared step without samples."""
        self.optimizer.zero_grad(set_to_none=True)

    def update(self, *, at: int) -> None:
        """The optimizer's step at the learning rate that belongs to `at`."""
        if self.captured is None:
            self.plain_update(at=at)
        else:
            self.captured.update(at=at)

    # The same, one operation after the other.

    def plain_step(self, batch: Any, *, samples: int, at: int) -> None:
        self.plain_gradient(batch, samples=samples)
        self.plain_update(at=at)

    def plain_gradient(self, batch: Any, *, samples: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.compute_gradient(batch, samples=samples)
        if self.device.type == "cpu":
            self.check_loss()

    def compute_gradient(self, batch: Any, *, samples: int) -> None:
        """Forward, backward and clipping, without any wait for the device."""
        try:
            self._backward(batch, samples)
        except OutriderError:
            raise
        except Exception as error:
            raise self._step_error(error) from error
        if self.recipe.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.arena.parameters, self.recipe.max_grad_norm)

    def plain_update(self, *, at: int) -> None:
        self.follow_schedule(at)
        try:
            self.optimizer_step()
        except Exception as error:
            raise self._step_error(error, " in the optimizer") from error
        self.steps += 1

    def saw_ranks(self, effective_ranks: float) -> None:
        """How many equal ranks would share the samples as unequally as these do; the same on all ranks."""
        if self.compensation.follows_ranks:
            self.rate_factor = effective_ranks

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group, as the next step uses it."""
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

    def _backward(self, data: Any, samples: int) -> None:
        if self.recipe.accumulate == 1:
            loss = self._loss(data, samples)
            loss.backward()
            self.tally.add(loss, samples, self.steps)
            return
        for piece, count in pieces(data, samples, self.recipe.accumulate):
            loss = self._loss(piece, count)
            (loss * (count / samples)).backward()
            self.tally.add(loss, count, self.steps)

    def _loss(self, data: Any, samples: int) -> torch.Tensor:
        with writing(self.logbook, samples=samples), self.autocast():
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

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return autocast(self.recipe.precision, self.device)

    def check_loss(self) -> None:
        """Raise if a loss since the start was not finite; waits for a GPU."""
        refuse_bad(self.tally.bad_step(), rank=self.rank, name=self.name)

    def watch_loss(self) -> None:
        """The same without waiting: a GPU's losses are those it had seen when this was called before."""
        refuse_bad(self.tally.bad_step_so_far(), rank=self.rank, name=self.name)

    def follow_schedule(self, at: int) -> None:
        """The schedule is a function of the world's samples, so every policy and every solo sees the same one."""
        if self.scheduler is None:
            return
        due = at // self.recipe.batch_size
        try:
            with _no_advice_on_order() if self.steps == 0 else contextlib.nullcontext():
                while self.ticks < due:
                    self.scheduler.step()
                    self.ticks += 1
        except Exception as error:
            raise self._step_error(error, " in the optimizer") from error

    def _step_error(self, error: Exception, where: str = "") -> StepError:
        return StepError(
            f"rank {self.rank} ({self.name}), step {self.steps}{where}: {named(error)}",
            rank=self.rank,
            step=self.steps,
        )

    @torch.no_grad()
    def evaluate(self, data: Any) -> float:
        """The user's evaluation of one batch, in evaluation mode."""
        assert self.recipe.evaluate is not None
        with evaluating([self.model]), self.autocast():
            value = self.call_user("evaluate", self.recipe.evaluate, self.model, data)
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            return float(value)
        raise self._bad_result(
            f"evaluate must return a number, got {_describe(value)}", hint="return the mean over the batch"
        )

    def call_user(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the user's other than the step; its exception names rank and step."""
        try:
            return function(*arguments)
        except OutriderError:
            raise
        except Exception as error:
            raise self._step_error(error, f" in {what}") from error

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """What this rank alone knows: optimizer, schedule, random state, steps."""
        return random_state(self.device) | {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "ticks": self.ticks,
            "steps": self.steps,
            "rate_factor": self.rate_factor,
        }

    def restore(self, state: dict[str, Any]) -> None:
        # A checkpoint may come from a rank whose device wanted another form of the same optimizer.
        form = OptimizerForm(self.optimizer)
        self.optimizer.load_state_dict(state["optimizer"])
        form.restore()
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.ticks, self.steps = state["ticks"], state["steps"]
        self.rate_factor = state["rate_factor"]
        restore_random(self.device, state)
        self.forget_captures()

    def forget_captures(self) -> None:
        """After anything that moved or replaced what a captured step knows by its address."""
        if self.captured is not None:
            self.captured.forget()


def _make_model(recipe: Recipe) -> nn.Module:
    model = copy.deepcopy(recipe.model) if isinstance(recipe.model, nn.Module) else recipe.model()
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model must be a torch.nn.Module or a function that makes one, got {type(model).__name__}",
            hint="pass model=make_model where make_model() returns an nn.Module",
        )
    if recipe.memory_format == "channels_last":
        to_channels_last(model)
    return model


def _make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = recipe.optimizer(model.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer must make a torch.optim.Optimizer, got {type(optimizer).__name__}",
            hint="pass optimizer=lambda p: torch.optim.Adam(p, 1e-3)",
        )
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * (1.0 if recipe.lr_scale == "auto" else recipe.lr_scale)
    return optimizer


def _make_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    if recipe.scheduler is None:
        return None
    scheduler = recipe.scheduler(optimizer)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            f"scheduler must make a learning-rate schedule that advances by steps, got {type(scheduler).__name__}",
            hint="pass scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, num_steps)",
        )
    return scheduler


@contextlib.contextmanager
def _no_advice_on_order() -> Iterator[None]:
    """torch warns of a schedule that moves before the optimizer; here other ranks' steps may have moved it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        yield


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__
