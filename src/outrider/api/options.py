"""The options of a training run by name: what exists, what a mistyped one may have meant, how values are read.

Decides the public spelling of options; their meaning and checks live with Recipe and RunConfig.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict

from outrider.average.outer import Outer
from outrider.data.augmented_feed import AugmentFunction
from outrider.errors import ConfigError, nearest
from outrider.replica.recipe import EvaluateFunction, Recipe, SchedulerFactory, check_choice
from outrider.runtime.config import RunConfig
from outrider.runtime.context import EpochContext

OUTERS = ("auto", "none", "nesterov", "slowmo")


class SessionOptions(TypedDict, total=False):
    """Everything `Session()` takes; the meaning is that of `train()`."""

    policy: Literal["sync", "balanced", "cadence", "async", "independent"]
    backend: Literal["auto", "cpu", "nccl"]
    devices: str | Sequence[str]
    anchor: int | None
    min_anchor: int | None
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
    outer: Literal["auto", "none", "nesterov", "slowmo"] | Outer
    seed: int
    verify: bool
    run_dir: str | PathLike[str] | None
    checkpoint_every: float | None
    resume: str | PathLike[str] | None
    threads_per_rank: int | None
    port: int
    timeout_s: float
    record_schedule: bool


class Options(SessionOptions, total=False):
    """Everything `train()` takes besides model, optimizer, step and dataset."""

    batch_size: int
    epochs: int
    evaluate: EvaluateFunction | None
    eval_dataset: Any
    accumulate: int
    precision: Literal["fp32", "bf16"]
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
    sample_utilization: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A whole run, checked."""

    recipe: Recipe
    config: RunConfig


def make_order(required: Mapping[str, Any], options: Mapping[str, Any]) -> Order:
    """Check names, read values and build the recipe and the run's conditions."""
    _check_names(options, valid=list(Options.__annotations__), owner="train")
    if "batch_size" not in options:
        raise ConfigError("batch_size is missing", hint="pass batch_size=64")
    return _order({**required, **options})


def _order(values: Mapping[str, Any]) -> Order:
    given = {name: _read(name, value) for name, value in values.items()}
    config_names = {field.name for field in fields(RunConfig)}
    return Order(
        recipe=Recipe(**{name: value for name, value in given.items() if name not in config_names}),
        config=RunConfig(**{name: value for name, value in given.items() if name in config_names}),
    )


def make_session_order(options: Mapping[str, Any]) -> Order:
    """The same for a session, whose models, data and steps are the user's own business."""
    _check_names(options, valid=list(SessionOptions.__annotations__), owner="Session")
    required = {"model": _unused, "optimizer": _unused, "step": _unused, "dataset": None, "batch_size": 1}
    order = _order({**required, **options})
    every = order.config.checkpoint_every
    if every is not None and every < 1:
        raise ConfigError(
            f"checkpoint_every must be a whole number of epochs in a loop of your own, got {every:g}",
            hint="pass checkpoint_every=1",
        )
    return order


def _unused(*arguments: Any) -> Any:
    raise AssertionError("a session takes no steps of its own")


def _check_names(options: Mapping[str, Any], *, valid: Collection[str], owner: str) -> None:
    for name in options:
        if name not in valid:
            close = nearest(name, valid)
            hint = f"did you mean {close!r}?" if close else f"see the options of outrider.{owner}"
            raise ConfigError(f"unknown option {name!r}", hint=hint)


def _read(name: str, value: Any) -> Any:
    """Sequences become tuples, paths become Paths, names of outer optimizers become their settings."""
    if name in ("shares", "speed_hints") and value is not None:
        return tuple(float(part) for part in value)
    if name == "devices" and not isinstance(value, str):
        return tuple(str(part) for part in value)
    if name in ("run_dir", "resume") and value is not None:
        return Path(value).expanduser().absolute()
    if name == "outer" and not isinstance(value, Outer):
        check_choice("outer", value, OUTERS)
        return value if value == "auto" else Outer(kind=value)
    return value
