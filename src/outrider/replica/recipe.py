"""What is trained and how, apart from where: the options that the runtime and the lab share.

Decides what a valid recipe is; every value is checked here once and trusted afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import nn

from outrider.average.outer import Outer
from outrider.core.planner import PlannerConfig
from outrider.core.policies import POLICIES
from outrider.data.augmented_feed import AugmentFunction
from outrider.errors import ConfigError, nearest

ModelSource = nn.Module | Callable[[], nn.Module]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
StepFunction = Callable[[nn.Module, Any], torch.Tensor]
EvaluateFunction = Callable[[nn.Module, Any], torch.Tensor | float]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

PolicyName = Literal["sync", "balanced", "cadence", "async", "independent"]
PRECISIONS = ("fp32", "bf16")
EXECUTIONS = ("auto", "eager", "compile", "graph")
MEMORY_FORMATS = ("auto", "channels_last", "contiguous")
MIN_ANCHOR = 20
"""More frequent averages cost time and were found to teach no more: see docs/log.md."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A training recipe; `batch_size` is per rank, for `balanced` the batch of the whole world."""

    model: ModelSource
    optimizer: OptimizerFactory
    step: StepFunction
    dataset: Any
    batch_size: int
    epochs: int = 1
    policy: str = "cadence"
    evaluate: EvaluateFunction | None = None
    eval_dataset: Any = None
    scheduler: SchedulerFactory | None = None
    augment: AugmentFunction | None = None
    lr_scale: float | Literal["auto"] = "auto"
    max_grad_norm: float | None = None
    accumulate: int = 1
    precision: str = "fp32"
    execution: str = "auto"
    """How steps run, on each device by itself; see `replica.execution`."""
    memory_format: str = "auto"
    """channels_last, contiguous, or what fits all devices."""
    fused_optimizer: bool | Literal["auto"] = "auto"
    """One kernel for all parameters, where torch has it."""
    tf32: bool | Literal["auto"] = "auto"
    """Shorter mantissas in fp32 products; by default in convolutions only, as torch does."""
    seed: int = 0
    shuffle: bool = True
    outer: Outer | Literal["auto"] = "auto"
    average_optimizer: bool = False
    anchor: int | None = None
    min_anchor: int | None = None
    max_anchor: int = 200
    overhead_target: float = 0.10
    drift_threshold: float | None = None
    guard: bool = True
    max_batch_diff: int | None = None
    max_overshoot: int = 4
    shares: tuple[float, ...] | None = None
    speed_hints: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, POLICIES)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("execution", self.execution, EXECUTIONS)
        check_choice("memory_format", self.memory_format, MEMORY_FORMATS)
        for name in ("fused_optimizer", "tf32"):
            check_flag_or_auto(name, getattr(self, name))
        for name in ("batch_size", "epochs", "accumulate"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("max_overshoot", self.max_overshoot, 0)
        check_positive("max_grad_norm", self.max_grad_norm)
        if self.lr_scale != "auto":
            check_positive("lr_scale", self.lr_scale)
        for name in ("model", "optimizer", "step"):
            check_callable(name, getattr(self, name))
        for name in ("evaluate", "scheduler", "augment"):
            if getattr(self, name) is not None:
                check_callable(name, getattr(self, name))
        for name in ("guard", "shuffle", "average_optimizer"):
            check_flag(name, getattr(self, name))
        self._check_evaluation()
        if self.accumulate > self.batch_size:
            raise ConfigError(
                f"accumulate must be <= batch_size, got accumulate={self.accumulate}, batch_size={self.batch_size}",
                hint="a batch is computed in `accumulate` pieces of at least one sample",
            )

    def _check_evaluation(self) -> None:
        if self.evaluate is not None and self.eval_dataset is None:
            raise ConfigError("evaluate was given without eval_dataset", hint="pass eval_dataset=test_set")
        if self.evaluate is None and self.eval_dataset is not None:
            raise ConfigError("eval_dataset was given without evaluate", hint="pass evaluate=accuracy")

    def planner_config(self, world_size: int, *, batch_size: int | None = None) -> PlannerConfig:
        return PlannerConfig(
            world_size=world_size,
            batch_size=batch_size or self.batch_size,
            anchor=self.anchor,
            min_anchor=min(MIN_ANCHOR, self.max_anchor) if self.min_anchor is None else self.min_anchor,
            max_anchor=self.max_anchor,
            overhead_target=self.overhead_target,
            drift_threshold=self.drift_threshold,
            guard=self.guard,
            max_batch_diff=self.max_batch_diff,
            shares=self.shares,
            speed_hints=self.speed_hints,
            is_blocking=self.policy == "cadence",
        )


OBJECTS = frozenset({"model", "optimizer", "step", "dataset", "evaluate", "eval_dataset", "scheduler", "augment"})
"""Options that are objects of the user's, not settings."""


def plain(recipe: Recipe) -> dict[str, Any]:
    """The settings of a recipe without the user's objects, as they are."""
    return {f.name: getattr(recipe, f.name) for f in fields(recipe) if f.name not in OBJECTS}


def settings(recipe: Recipe) -> dict[str, Any]:
    """The same for `config.json`."""
    return plain(recipe) | {"outer": recipe.outer if recipe.outer == "auto" else asdict(recipe.outer)}


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    valid = list(choices)
    if value in valid:
        return
    close = nearest(str(value), valid)
    hint = f"did you mean {close!r}?" if close else f"choose one of {', '.join(valid)}"
    raise ConfigError(f"unknown {name} {value!r}", hint=hint)


def check_at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            f"{name} must be a whole number >= {least}, got {value!r}", hint=f"pass {name}={least} or more"
        )


def check_positive(name: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and value > 0):  # type: ignore[operator]  # a number by now
        raise ConfigError(f"{name} must be a number > 0, got {value!r}", hint=f"leave {name} out for its default")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}", hint=f"pass {name}=True or {name}=False")


def check_flag_or_auto(name: str, value: object) -> None:
    if not isinstance(value, bool) and value != "auto":
        raise ConfigError(f"{name} must be True, False or 'auto', got {value!r}", hint=f"leave {name} out for 'auto'")


def check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise ConfigError(
            f"{name} must be a function, got {type(value).__name__}", hint=f"pass {name}=a_function, not its result"
        )
