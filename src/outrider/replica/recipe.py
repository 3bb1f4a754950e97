"""The recipe of a training run: model, optimizer, data and all options that training and the lab share.

Decides which values are valid; every value is checked here once and trusted afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from outrider.average.outer import Outer
from outrider.average.wire_codec import WIRES
from outrider.data.augmented_feed import AugmentFunction
from outrider.data.order import num_kept
from outrider.data.sample_sequence import SampleSequence
from outrider.errors import ConfigError, nearest
from outrider.policy.extent import Extent
from outrider.policy.policies import DEFAULT_POLICY, OUTER_STEP_POLICIES, PolicySpec, policy_spec
from outrider.policy.window_plan import OVERHEAD_TARGET, PlannerConfig
from outrider.replica.batch_sizes import BatchSizes, by_rank, check_batch_size, mean_size, sizes_of
from outrider.replica.micro_batches import MicroBatch, check_micro_batch, check_one_per_rank
from outrider.replica.option_info import options_where
from outrider.replica.precision import Precision, check_precision

ModelSource = nn.Module | Callable[[], nn.Module]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
StepFunction = Callable[[nn.Module, Any], torch.Tensor]
EvaluateFunction = Callable[[nn.Module, Any], torch.Tensor | float]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

CALLED_WITH = {
    "model": (),
    "optimizer": ("parameters",),
    "step": ("model", "batch"),
    "evaluate": ("model", "batch"),
    "scheduler": ("optimizer",),
    "augment": ("batch", "keys"),
    "collate": ("samples",),
    "epoch_start": ("context",),
    "epoch_end": ("context",),
}
"""The arguments of the user's functions."""
EXECUTIONS = ("auto", "eager", "compile", "graph")
MEMORY_FORMATS = ("auto", "channels_last", "contiguous")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopRecipe:
    """How ranks learn together, in `train()` and in a user's loop; `OPTION_INFOS` explains each option."""

    policy: str | PolicySpec = DEFAULT_POLICY
    lr_scale: float | Literal["auto"] = 1.0
    max_grad_norm: float | None = None
    seed: int = 0
    outer: Outer | Literal["auto"] = "auto"
    average_optimizer: bool = False
    wire: str = "fp32"
    anchor: int | None = None
    min_anchor: int = 1
    max_anchor: int = 200
    overhead_target: float = OVERHEAD_TARGET
    drift_threshold: float | None = None
    guard: bool = True
    max_batch_diff: int | None = None
    max_overshoot: int = 4
    shares: tuple[float, ...] | None = None
    speed_hints: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        policy_spec(self.policy)
        check_at_least("max_overshoot", self.max_overshoot, 0)
        check_positive("max_grad_norm", self.max_grad_norm)
        if self.lr_scale != "auto":
            check_positive("lr_scale", self.lr_scale)
        for name in ("guard", "average_optimizer"):
            check_flag(name, getattr(self, name))
        check_choice("wire", self.wire, WIRES)
        self._check_wire()
        if self.policy_spec.shares_steps and self.outer != "auto" and self.outer.kind != "none":
            raise ConfigError(
                f"outer={self.outer.kind!r} was given, but policy {self.policy_spec.name!r} shares exact steps",
                hint=f"it belongs to averages of parameters: pass a policy such as {OUTER_STEP_POLICIES[0]!r}",
            )

    def _check_wire(self) -> None:
        spec = self.policy_spec
        if self.wire == "fp32" or (spec.averages and (spec.switches or not spec.shares_steps)):
            return
        reason = "averages gradients at every step, and promises exact ones" if spec.averages else "sends nothing"
        raise ConfigError(
            f"wire={self.wire!r} was given, but policy {spec.name!r} {reason}",
            hint=f"leave wire out, or pass a policy that averages parameters, such as {OUTER_STEP_POLICIES[0]!r}",
        )

    @property
    def policy_spec(self) -> PolicySpec:
        """The declaration of the policy: its row in the table, or the user's own."""
        return policy_spec(self.policy)

    def step_samples(self, world_size: int, *, batch_size: int) -> int:
        """Samples of all ranks in one step; in `sync` one batch of every rank."""
        return self.policy_spec.step_samples(batch_size, world_size)

    def own_batch_size(self, rank: int, *, batch_size: int) -> int:
        """The batch size of one rank, when `batch_size` is that of all ranks or their mean."""
        return batch_size

    def planner_config(self, world_size: int, *, batch_size: int) -> PlannerConfig:
        return PlannerConfig(
            world_size=world_size,
            batch_size=batch_size,
            anchor=self.anchor,
            min_anchor=self.min_anchor,
            max_anchor=self.max_anchor,
            overhead_target=self.overhead_target,
            drift_threshold=self.drift_threshold,
            guard=self.guard,
            max_batch_diff=self.max_batch_diff,
            shares=self.shares,
            speed_hints=self.speed_hints,
            is_blocking=self.policy_spec.blocks_at_averages,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(LoopRecipe):
    """A whole training recipe, with the model, the data and the step of `train()`."""

    model: ModelSource
    optimizer: OptimizerFactory
    step: StepFunction
    dataset: Any
    batch_size: BatchSizes
    epochs: int = 1
    steps: int | None = None
    samples: int | None = None
    evaluate: EvaluateFunction | None = None
    eval_dataset: Any = None
    scheduler: SchedulerFactory | None = None
    augment: AugmentFunction | None = None
    accumulate: int = 1
    micro_batch: MicroBatch = "auto"
    precision: Precision = "fp32"
    execution: str = "auto"
    memory_format: str = "auto"
    fused_optimizer: bool | Literal["auto"] = "auto"
    tf32: bool | Literal["auto"] = "auto"
    shuffle: bool = True
    order: Any = None
    length: int | None = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        # A dataclass with slots creates a new class, so `super()` without arguments would not find it.
        LoopRecipe.__post_init__(self)
        check_precision(self.precision)
        check_choice("execution", self.execution, EXECUTIONS)
        check_choice("memory_format", self.memory_format, MEMORY_FORMATS)
        for name in ("fused_optimizer", "tf32"):
            check_flag_or_auto(name, getattr(self, name))
        check_batch_size(self.batch_size, self.policy_spec)
        for name in ("epochs", "accumulate"):
            check_at_least(name, getattr(self, name), 1)
        self._check_length()
        if not isinstance(self.model, nn.Module):
            check_callable("model", self.model)
        for name in ("optimizer", "step"):
            check_callable(name, getattr(self, name))
        for name in ("evaluate", "scheduler", "augment"):
            if getattr(self, name) is not None:
                check_callable(name, getattr(self, name))
        for name in ("shuffle", "drop_last"):
            check_flag(name, getattr(self, name))
        self._check_positions()
        self._check_evaluation()
        check_micro_batch(self.micro_batch)
        if self.accumulate > min(sizes_of(self.batch_size)):
            raise ConfigError(
                f"accumulate must be <= batch_size, got accumulate={self.accumulate}, batch_size={self.batch_size}",
                hint="a batch is computed in `accumulate` pieces of at least one sample",
            )
        if self.drop_last and not isinstance(self.batch_size, int):
            raise ConfigError(
                "drop_last=True was given, but batch_size has one value per rank: no size says what the last batch is",
                hint="leave drop_last out: the last samples are dealt to the ranks that finish them first",
            )

    @property
    def mean_batch_size(self) -> int:
        """The batch size, or its mean over ranks: the unit of schedule ticks and of `steps`."""
        return mean_size(self.batch_size)

    @property
    def batch_sampler(self) -> str | None:
        """The name of the batch sampler whose batches are taken whole; None without one."""
        return self.order.name if isinstance(self.order, SampleSequence) and self.order.has_batches else None

    def with_devices(self, devices: Sequence[str]) -> Recipe:
        """The same recipe with batch sizes in the order of devices, if they were given by name."""
        if not isinstance(self.batch_size, dict):
            return self
        return replace(self, batch_size=by_rank(self.batch_size, devices))

    def own_batch_size(self, rank: int, *, batch_size: int) -> int:
        assert not isinstance(self.batch_size, dict), "batch sizes by device are resolved before ranks start"
        return self.batch_size[rank] if isinstance(self.batch_size, tuple) else batch_size

    def planner_config(self, world_size: int, *, batch_size: int) -> PlannerConfig:
        config = LoopRecipe.planner_config(self, world_size, batch_size=batch_size)
        return replace(config, batch_sizes=self.batch_size) if isinstance(self.batch_size, tuple) else config

    def check_ranks(self, world_size: int) -> None:
        """Raise if a list does not have one value per rank."""
        if isinstance(self.batch_size, tuple):
            check_one_per_rank("batch_size", self.batch_size, world_size=world_size)
        for name in ("micro_batch", "precision"):
            if isinstance(getattr(self, name), tuple):
                check_one_per_rank(name, getattr(self, name), world_size=world_size)

    def _check_length(self) -> None:
        for name in ("steps", "samples"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        if self.steps is not None and self.samples is not None:
            refuse_two_lengths(["steps", "samples"])

    def _check_positions(self) -> None:
        if self.length is not None:
            check_at_least("length", self.length, 1)
        is_order = isinstance(self.order, SampleSequence) or callable(self.order) or hasattr(self.order, "__iter__")
        if self.order is not None and not is_order:
            raise ConfigError(
                f"order must be a function of the epoch or a sampler, got {type(self.order).__name__}",
                hint="pass order=lambda epoch: indices",
            )

    def _check_evaluation(self) -> None:
        if self.evaluate is not None and self.eval_dataset is None:
            raise ConfigError("evaluate was given without eval_dataset", hint="pass eval_dataset=test_set")
        if self.evaluate is None and self.eval_dataset is not None:
            raise ConfigError("eval_dataset was given without evaluate", hint="pass evaluate=accuracy")

    def extent(self, num_samples: int, world_size: int) -> Extent:
        """The length of the run on a data set of this size."""
        unit = self.step_samples(world_size, batch_size=self.mean_batch_size)
        kept = num_kept(num_samples, drop_last=self.drop_last, unit=unit)
        steps = None if self.steps is None else self.steps * self.mean_batch_size
        return Extent(epoch_samples=kept, total=steps or self.samples or self.epochs * kept)


def refuse_two_lengths(names: Sequence[str]) -> NoReturn:
    raise ConfigError(
        f"{' and '.join(names)} were given, and each of them says how long to train",
        hint="pass one of epochs, steps and samples",
    )


OBJECTS = options_where(Recipe, lambda info: info.is_object)
"""Options that are objects of the user, not plain values."""
SENT_BY_NAME = options_where(Recipe, lambda info: info.holds_code)
"""Options sent to the ranks one by one, so that errors can name them."""


def plain(recipe: LoopRecipe) -> dict[str, Any]:
    """The plain values of a recipe, without the user's objects."""
    return {f.name: getattr(recipe, f.name) for f in fields(recipe) if f.name not in OBJECTS}


def settings(recipe: LoopRecipe) -> dict[str, Any]:
    """The plain values of a recipe for `config.json`."""
    outer = recipe.outer if recipe.outer == "auto" else asdict(recipe.outer)
    return plain(recipe) | {"policy": recipe.policy_spec.name, "outer": outer}


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
    arguments = CALLED_WITH[name]
    try:
        signature = inspect.signature(value).replace(return_annotation=inspect.Signature.empty)
    except (TypeError, ValueError):
        return  # some functions written in C have no signature
    try:
        signature.bind(*arguments)
    except TypeError:
        own = getattr(value, "__name__", type(value).__name__)
        raise ConfigError(
            f"{name} is called as {name}({', '.join(arguments)}), but {own}{signature} does not take that",
            hint=f"pass a function of ({', '.join(arguments)})" if arguments else "pass a function without arguments",
        ) from None
