"""The options of a training run by name: which exist, suggestions for mistyped names, and how values are converted.

Decides the public spelling of options; Recipe and RunConfig define their meaning and check their values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict

from outrider.api.train_data import read_data
from outrider.average.outer import Outer
from outrider.average.transport.backend_table import BackendName, BackendSpec
from outrider.data.augmented_feed import AugmentFunction
from outrider.errors import ConfigError, nearest
from outrider.policy.policies import PolicyName, PolicySpec
from outrider.rank.epoch_context import EpochContext
from outrider.record.run_config import RunConfig
from outrider.replica.recipe import (
    EvaluateFunction,
    LoopRecipe,
    Recipe,
    SchedulerFactory,
    check_choice,
    refuse_two_lengths,
)
from outrider.trackers.tracker import Tracker
from outrider.trackers.tracker_names import TrackerName, as_trackers
from outrider.world.environment import overrides

PrecisionName = Literal["fp32", "bf16", "fp16", "auto"]
OUTERS = ("auto", "none", "nesterov", "slowmo")


class SessionOptions(TypedDict, total=False):
    """The options of `Session()`, with the same meaning as in `train()`."""

    policy: PolicyName | PolicySpec
    backend: BackendName | BackendSpec
    devices: str | Sequence[str]
    anchor: int | None
    min_anchor: int
    max_anchor: int
    overhead_target: float
    drift_threshold: float | None
    guard: bool
    max_batch_diff: int | None
    max_overshoot: int
    shares: Sequence[float] | None
    speed_hints: Sequence[float] | None
    max_grad_norm: float | None
    lr_scale: float | Literal["auto"]
    average_optimizer: bool
    wire: Literal["fp32", "bf16", "int8"]
    outer: Literal["auto", "none", "nesterov", "slowmo"] | Outer
    seed: int
    verify: bool
    run_dir: str | PathLike[str] | None
    checkpoint_every: float | str | None
    keep: int
    resume: str | PathLike[str] | None  # "auto", a run folder or a checkpoint
    threads_per_rank: int | None
    environments: str | Sequence[str] | Mapping[str, str] | None
    port: int
    timeout_s: float
    grace_s: float
    record_schedule: bool
    trackers: TrackerName | Tracker | Sequence[TrackerName | Tracker] | None
    sample_utilization: bool
    watch: bool
    quiet: bool | Literal["auto"]


class Options(SessionOptions, total=False):
    """The options of `train()` besides model, optimizer, step and dataset."""

    batch_size: int | Sequence[int] | Mapping[str, int]
    epochs: int
    steps: int
    samples: int
    evaluate: EvaluateFunction | None
    eval_dataset: Any
    accumulate: int
    micro_batch: int | Literal["auto"] | Sequence[int | Literal["auto"]]
    precision: PrecisionName | Sequence[PrecisionName]
    execution: Literal["auto", "eager", "compile", "graph"]
    memory_format: Literal["auto", "channels_last", "contiguous"]
    fused_optimizer: bool | Literal["auto"]
    tf32: bool | Literal["auto"]
    scheduler: SchedulerFactory | None
    augment: AugmentFunction | None
    epoch_start: Callable[[EpochContext], None] | None
    epoch_end: Callable[[EpochContext], None] | None
    workers: int
    collate: Callable[[list[Any]], Any] | None
    resident: bool | Literal["auto"]
    shuffle: bool
    order: Callable[[int], Any] | Iterable[int] | None
    length: int | None
    drop_last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRun:
    """The checked options of a run of `train()`."""

    recipe: Recipe
    config: RunConfig
    is_policy_given: bool

    @property
    def policy_words(self) -> str:
        return _policy_words(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedSession:
    """The checked options of a session, where the user owns models, data and steps."""

    recipe: LoopRecipe
    config: RunConfig
    is_policy_given: bool

    @property
    def policy_words(self) -> str:
        return _policy_words(self)


def _policy_words(order: CheckedRun | CheckedSession) -> str:
    """The policy and why it is used."""
    return f"{order.recipe.policy_spec.name} {'as given' if order.is_policy_given else 'by default'}"


def make_order(required: Mapping[str, Any], options: Mapping[str, Any]) -> CheckedRun:
    """Check names, convert values, and build the Recipe and the RunConfig."""
    _check_names(options, valid=list(Options.__annotations__), owner="train")
    dataset, options = read_data(required["dataset"], options)
    required = {**required, "dataset": dataset}
    if "batch_size" not in options:
        raise ConfigError("batch_size is missing", hint="pass batch_size=64")
    lengths = [name for name in ("epochs", "steps", "samples") if options.get(name) is not None]
    if len(lengths) > 1:
        refuse_two_lengths(lengths)
    recipe, config = _parted({**required, **options})
    return CheckedRun(recipe=Recipe(**recipe), config=RunConfig(**config), is_policy_given="policy" in options)


def make_session_order(options: Mapping[str, Any]) -> CheckedSession:
    """Like `make_order` for a session, without the options about models, data and steps."""
    if "micro_batch" in options:
        raise ConfigError(
            "a loop of your own does not take micro_batch: the forward pass is in the loop, not in outrider",
            hint="cut the batch and call s.backward(loss * len(piece) / len(batch)) for each piece inside "
            "`with s.no_sync():`, then s.optimizer_step(); see docs/cards.md",
        )
    _check_names(options, valid=list(SessionOptions.__annotations__), owner="Session")
    recipe, config = _parted({"checkpoint_every": None, **options})
    order = CheckedSession(recipe=LoopRecipe(**recipe), config=RunConfig(**config), is_policy_given="policy" in options)
    if (every := order.config.every.epochs) is not None and every < 1:
        raise ConfigError(
            f"checkpoint_every must be a whole number of epochs in a loop of your own, got {every:g}",
            hint='pass checkpoint_every=1, or a time such as "10min"',
        )
    return order


_overridden: list[bool] = []
"""One entry per run of this process whose options were overridden: a run folder can be given to the first only."""


def overridden(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run, some replaced by values that `outrider advise` or `outrider compare` sets."""
    given = overrides()
    if not given:
        return dict(options)
    if _overridden:
        given.pop("run_dir", None)
    _overridden.append(True)
    return {**options, **given}


def _parted(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split values into those of the Recipe and those of the RunConfig."""
    given = {name: _read(name, value) for name, value in values.items()}
    config_names = {field.name for field in fields(RunConfig)}
    recipe = {name: value for name, value in given.items() if name not in config_names}
    return recipe, {name: value for name, value in given.items() if name in config_names}


def _check_names(options: Mapping[str, Any], *, valid: Collection[str], owner: str) -> None:
    for name in options:
        if name not in valid:
            close = nearest(name, valid)
            hint = f"did you mean {close!r}?" if close else f"see the options of outrider.{owner}"
            raise ConfigError(f"unknown option {name!r}", hint=hint)


def _read(name: str, value: Any) -> Any:
    """Convert sequences to tuples, paths to Paths, and names of outer optimizers to their settings."""
    if name in ("shares", "speed_hints") and value is not None:
        return tuple(float(part) for part in value)
    if name == "batch_size" and isinstance(value, Mapping):
        return dict(value)
    if name == "batch_size" and not isinstance(value, str | int | float) and value is not None:
        return tuple(value)
    if name == "micro_batch" and not isinstance(value, str | int):
        return tuple(value)
    if name == "precision" and not isinstance(value, str):
        return tuple(value)
    if name == "devices" and not isinstance(value, str):
        return tuple(str(part) for part in value)
    if name == "environments" and value is not None and not isinstance(value, str):
        return dict(value) if isinstance(value, Mapping) else tuple(str(part) for part in value)
    if name == "trackers":
        return as_trackers(value)
    if name == "resume" and value == "auto":
        return value
    if name in ("run_dir", "resume") and value is not None:
        if not isinstance(value, str | PathLike):
            what = '"auto" or a path' if name == "resume" else "a path"
            raise ConfigError(f"{name} must be {what}, got {value!r}", hint=f'pass {name}="runs/mine"')
        return Path(value).expanduser().absolute()
    if name == "outer" and not isinstance(value, Outer):
        check_choice("outer", value, OUTERS)
        return value if value == "auto" else Outer(kind=value)
    return value
