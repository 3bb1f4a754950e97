"""Turns the options of a sweep into a list of runs: models, modes and seeds, on which devices and data.

Decides the presets, and which modes are skipped because they cannot run here. All cases are known before the first one
starts. Starts nothing. Called by `bench run`, `bench sweep` and `bench rerun`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from outrider.bench.datasets.source import DataSource
from outrider.bench.modes import Mode, fits, mode_names, obstacle, parse_mode
from outrider.bench.suite.run_case import Planned
from outrider.bench.suite.runs import Case, Subject
from outrider.bench.tasks import Task
from outrider.bench.zoo import ENTRIES, RESNET_DEPTH, entry_named, suite_task
from outrider.errors import ConfigError, did_you_mean
from outrider.machine.devices import DeviceSpec, cuda_devices, resolve_devices

SMALL_PAIR = "cpu,cpu@0.4"
"""A pair of mismatched devices that every machine has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """The defaults of a sweep; None leaves a value to the models."""

    models: tuple[str, ...]
    modes: tuple[str, ...] | None
    """None is every mode that can run on the devices, peers at their tuned settings too."""
    num_seeds: int
    devices: str | None
    epochs: int | None = None
    max_samples: Mapping[str, int] = field(default_factory=dict)
    """By model; all samples for the others."""


PRESETS = {
    "quick": Preset(
        models=("mlp", "lenet"),
        modes=("solo-0", "solo-1", "independent", "ddp", "cpu-balanced", "cpu-cadence", "cpu-async"),
        num_seeds=3,
        devices=SMALL_PAIR,
        epochs=5,
        max_samples={
            "logistic": 8_000,
            "mlp": 8_000,
            "lenet": 2_000,
            "conv-ae": 2_000,
            "char-rnn": 128,
            "gpt-nano": 256,
            "resnet20": 512,
            "resnet20-graph": 512,
        },
    ),
    "full": Preset(models=tuple(ENTRIES), modes=None, num_seeds=3, devices=None),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteRequest:
    """The runs of a sweep."""

    models: tuple[str, ...]
    modes: tuple[str, ...]
    devices: tuple[DeviceSpec, ...]
    data: DataSource
    num_seeds: int = 1
    epochs: int | None = None
    batch_size: int | None = None
    depth: int | None = None
    """Of the ResNets among the models; None is 20."""
    max_samples: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_timed: bool = True
    """False if its cases are to run beside each other."""


def default_devices(found: Sequence[str]) -> str:
    """All CUDA devices if there are several, otherwise a mismatched pair of CPU ranks."""
    return ",".join(found) if len(found) > 1 else SMALL_PAIR


def preset_named(name: str) -> Preset:
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS, otherwise=f"presets are {', '.join(PRESETS)}")
        raise ConfigError(f"no preset is called {name!r}", hint=hint)
    return PRESETS[name]


def runnable_modes(devices: Sequence[DeviceSpec]) -> tuple[str, ...]:
    """Every mode that can run on these devices."""
    modes = [parse_mode(name, num_devices=len(devices)) for name in mode_names(len(devices))]
    return tuple(mode.name for mode in modes if obstacle(mode, devices) is None)


def plan(request: SuiteRequest) -> list[Planned]:
    """All cases, checked, so that a mistake shows before the first of them has run for an hour."""
    for model in request.models:
        entry_named(model)
    modes = [_checked_mode(name, request.devices) for name in request.modes]
    for mode in modes:
        _check_fits_one(mode, request.models)
    tasks = {model: _make_task(request, model, seed=0) for model in request.models}
    return [
        _planned(request, tasks[model], model=model, mode=mode, seed=seed)
        for seed in range(request.num_seeds)
        for model in request.models
        for mode in modes
        if fits(mode, model)
    ]


def _check_fits_one(mode: Mode, models: Sequence[str]) -> None:
    """A mode that fits some of the models is run with those; one that fits none is a mistake."""
    if not any(fits(mode, model) for model in models):
        raise ConfigError(
            f"mode {mode.name} trains models written as a flow, got {', '.join(models)}",
            hint=f"such models are {', '.join(name for name in ENTRIES if fits(mode, name))}",
        )


def _checked_mode(name: str, devices: Sequence[DeviceSpec]) -> Mode:
    mode = parse_mode(name, num_devices=len(devices))
    reason = obstacle(mode, devices)
    if reason is not None:
        raise ConfigError(
            f"mode {name} cannot run on {','.join(map(str, devices))}: {reason}",
            hint="`outrider bench list` shows which modes can",
        )
    return mode


def _make_task(request: SuiteRequest, model: str, *, seed: int) -> Task:
    return suite_task(
        model,
        data=replace(request.data, max_samples=_max_samples(request, model)),
        epochs=request.epochs,
        seed=seed,
        batch_size=request.batch_size,
        depth=_depth(request, model) or RESNET_DEPTH,
    )


def _max_samples(request: SuiteRequest, model: str) -> int | None:
    return request.max_samples.get(model, request.data.max_samples)


def _depth(request: SuiteRequest, model: str) -> int | None:
    """None if the model has no depth to choose, or the usual one."""
    has_depth = entry_named(model).make_at_depth is not None
    return request.depth if has_depth and request.depth != RESNET_DEPTH else None


def _planned(request: SuiteRequest, task: Task, *, model: str, mode: Mode, seed: int) -> Planned:
    case = Case(
        model=model,
        mode=mode.name,
        seed=seed,
        epochs=task.epochs,
        batch_size=task.batch_size,
        devices=tuple(str(spec) for spec in request.devices),
        data_name=task.data_name,
        max_samples=_max_samples(request, model),
        depth=_depth(request, model),
        settings=dict(request.settings),
        is_timed=request.is_timed,
    )
    # Whether there is a network was found out just now; a run must not find otherwise, nor wait for it again.
    decided = replace(request, data=replace(request.data, may_download=False))
    return Planned(case=case, subject=subject_of(task), make_task=partial(_make_task, decided, model, seed=seed))


def subject_of(task: Task) -> Subject:
    return Subject(
        metric=task.metric,
        larger_is_better=task.larger_is_better,
        is_stand_in=task.is_stand_in,
        target=task.target,
        published=None if task.is_stand_in else task.published,
    )


def plan_again(case: Case, *, data: DataSource) -> Planned:
    """The same case again, alone and therefore timed; the data must be the same."""
    devices = resolve_devices(case.devices, cuda_devices=cuda_devices()).devices
    request = SuiteRequest(
        models=(case.model,),
        modes=(case.mode,),
        devices=devices,
        data=replace(data, max_samples=case.max_samples),
        epochs=case.epochs,
        batch_size=case.batch_size,
        depth=case.depth,
        settings=case.settings,
    )
    task = _make_task(request, case.model, seed=case.seed)
    mode = _checked_mode(case.mode, devices)
    planned = _planned(request, task, model=case.model, mode=mode, seed=case.seed)
    if planned.case.data_name != case.data_name:
        raise ConfigError(
            f"the run used {case.data_name}, found here is {planned.case.data_name}",
            hint="name the folder of the data with --data",
        )
    return planned
