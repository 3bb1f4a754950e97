"""Measures the cost of averaging: throughput of each mode relative to `independent`, all ranks without averaging.

Decides the order of runs (modes interleaved in rounds, so that noise affects all alike) and the ratios.
Run by `make bench` as `python -m outrider.bench.overhead`; `modes` trains.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from outrider.bench.measures import samples_per_s
from outrider.bench.modes import INDEPENDENT, Mode, parse_mode, run_mode
from outrider.bench.tables import UNKNOWN, text_table
from outrider.bench.tasks import Task, model_named, speed_task
from outrider.errors import ConfigError, OutriderError
from outrider.machine.devices import DeviceSpec, num_cores, parse_devices, threads_per_rank
from outrider.record.run_record import commit, environment

SCHEMA_VERSION = 1
DEVICES = "cpu,cpu@0.4"
MODELS = "mlp,lenet"
MODES = "independent,async,cadence,balanced,sync,ddp"
TARGETS = {"async": 0.95, "cadence": 0.92}
# An epoch of 3 s or so on one core: long enough that its start and end do not count.
SAMPLES = {"mlp": 50_000, "lenet": 8_000}


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadPlan:
    """The settings of the benchmark."""

    devices: tuple[DeviceSpec, ...]
    models: tuple[str, ...]
    modes: tuple[Mode, ...]
    rounds: int
    epochs: int
    output: Path

    def __post_init__(self) -> None:
        for model in self.models:
            model_named(model)
        if INDEPENDENT not in [mode.name for mode in self.modes]:
            raise ConfigError(
                f"modes must have {INDEPENDENT!r} among them, got {', '.join(mode.name for mode in self.modes)}",
                hint="the others are measured against it",
            )
        if self.epochs < 2:
            raise ConfigError(f"epochs must be >= 2, got {self.epochs}", hint="the first is warm-up and not counted")
        if self.rounds < 1:
            raise ConfigError(f"rounds must be >= 1, got {self.rounds}", hint="3 rounds show the spread")


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadSample:
    """Samples per second of one model by mode, one value per round."""

    model: str
    speeds: dict[str, list[float]] = field(default_factory=dict)

    def ratios(self, mode: str) -> list[float]:
        """To `independent` of the same round."""
        return [speed / most for speed, most in zip(self.speeds[mode], self.speeds[INDEPENDENT], strict=True)]


def measure(plan: OverheadPlan) -> list[OverheadSample]:
    """All rounds of all models; each mode alone in its own processes."""
    measured = [OverheadSample(model=model, speeds={mode.name: [] for mode in plan.modes}) for model in plan.models]
    tasks = [speed_task(model, epochs=plan.epochs, num_samples=SAMPLES[model]) for model in plan.models]
    for round_number in range(1, plan.rounds + 1):
        for task, one in zip(tasks, measured, strict=True):
            for mode in plan.modes:
                one.speeds[mode.name].append(_measure_one(plan, task, mode, round_number))
    return measured


def _measure_one(plan: OverheadPlan, task: Task, mode: Mode, round_number: int) -> float:
    run_dir = plan.output / f"round-{round_number}" / f"{task.name}-{mode.name}"
    speed = samples_per_s(run_mode(mode, task, devices=plan.devices, run_dir=run_dir).epochs)
    print(f"round {round_number} of {plan.rounds}: {task.name} {mode.name} {speed:,.0f} samples/s", file=sys.stderr)
    return speed


def render(measured: Sequence[OverheadSample]) -> str:
    """Ratios to `independent`, median and range over the rounds."""
    headers = ("model", "mode", "samples/s", "ratio", "range", "target")
    rows = [_row(one, mode) for one in measured for mode in one.speeds]
    return text_table(headers, rows, num_names=2)


def _row(one: OverheadSample, mode: str) -> list[str]:
    ratios = one.ratios(mode)
    target = TARGETS.get(_policy(mode))
    return [
        one.model,
        mode,
        f"{median(one.speeds[mode]):,.0f}",
        f"{median(ratios):.3f}",
        f"{min(ratios):.3f} to {max(ratios):.3f}",
        UNKNOWN if target is None else f">= {target:.2f} {'met' if median(ratios) >= target else 'missed'}",
    ]


def _policy(mode: str) -> str:
    return mode.rpartition("-")[2]


def document(plan: OverheadPlan, measured: Sequence[OverheadSample]) -> dict[str, Any]:
    """The measurement for programs, with all raw values."""
    return {
        "schema_version": SCHEMA_VERSION,
        "devices": [str(spec) for spec in plan.devices],
        "rounds": plan.rounds,
        "epochs": plan.epochs,
        "warm_up_epochs": 1,
        # The threads of the ranks, not of this process.
        "environment": environment() | {"threads_per_rank": threads_per_rank(plan.devices, num_cores())},
        "commit": commit(),
        "models": {one.model: {mode: _mode_document(one, mode) for mode in one.speeds} for one in measured},
    }


def _mode_document(one: OverheadSample, mode: str) -> dict[str, Any]:
    ratios = [round(ratio, 4) for ratio in one.ratios(mode)]
    return {
        "samples_per_s": [round(speed, 1) for speed in one.speeds[mode]],
        "ratios": ratios,
        "ratio": median(ratios),
        "target": TARGETS.get(_policy(mode)),
    }


def make_plan(*, devices: str, models: str, modes: str, rounds: int, epochs: int, output: Path | None) -> OverheadPlan:
    specs = parse_devices(devices)
    return OverheadPlan(
        devices=specs,
        models=tuple(models.split(",")),
        modes=tuple(parse_mode(name, num_devices=len(specs)) for name in modes.split(",")),
        rounds=rounds,
        epochs=epochs,
        output=output or Path("runs") / f"bench-{datetime.now():%Y%m%d-%H%M%S}",
    )


def overhead(
    devices: Annotated[str, typer.Option(help="Devices of the ranks.")] = DEVICES,
    models: Annotated[str, typer.Option(help="Models, as a comma list.")] = MODELS,
    modes: Annotated[str, typer.Option(help="Modes, independent among them.")] = MODES,
    rounds: Annotated[int, typer.Option(help="Rounds; each runs every mode once.")] = 3,
    epochs: Annotated[int, typer.Option(help="Epochs per run; the first is warm-up and not counted.")] = 3,
    output: Annotated[Path | None, typer.Option(help="Folder of the runs.")] = None,
) -> None:
    """Measure what averaging costs each mode, against all ranks without averaging."""
    try:
        plan = make_plan(devices=devices, models=models, modes=modes, rounds=rounds, epochs=epochs, output=output)
        measured = measure(plan)
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    print(f"throughput as a ratio to {INDEPENDENT} of the same round; rounds: {plan.rounds}; devices: {devices}")
    print(render(measured))
    print(f"runs: {plan.output}")
    print(json.dumps(document(plan, measured)))


if __name__ == "__main__":
    typer.run(overhead)
