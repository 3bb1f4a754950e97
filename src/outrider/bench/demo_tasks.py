"""The demo: one small task in every mode on the same devices, with the results as a table and as JSON.

Decides which modes are shown and the notes about them. The command line shows progress and prints the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from outrider.bench.measures import samples_per_s
from outrider.bench.modes import (
    DDP,
    ModeResult,
    Summary,
    ideal_samples_per_s,
    parse_mode,
    run_mode,
    summarise,
)
from outrider.bench.tables import UNKNOWN, number, text_table
from outrider.bench.tasks import Task
from outrider.errors import ConfigError
from outrider.machine.devices import DeviceSpec, num_cores, threads_per_rank
from outrider.policy.policies import DEFAULT_POLICY, TRAINING_POLICIES
from outrider.world.messages import Message

RESTING_SHARE = 0.02
BUSY_PART = 0.15
"""Use of the processors by other programs that is worth a warning."""
SCHEMA_VERSION = 1
SOLO = "solo-0"


class Watcher(Protocol):
    """Sees the demo as it goes."""

    def begin(self, mode: str, *, devices: Sequence[str], position: int, num_modes: int) -> None: ...

    def saw(self, message: Message) -> None: ...

    def end(self, result: ModeResult) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Demo:
    """A demo that ran to its end."""

    task: Task
    devices: tuple[DeviceSpec, ...]
    output: Path
    results: dict[str, ModeResult]

    @property
    def ideal(self) -> float | None:
        return ideal_samples_per_s(self.results, num_devices=len(self.devices))

    def summary(self, mode: str) -> Summary:
        solo = samples_per_s(self.results[SOLO].epochs)
        return summarise(self.results[mode], ideal=self.ideal, solo=solo, target=self.task.target)


def demo_modes(num_devices: int) -> tuple[str, ...]:
    """Each device alone for the ideal, torch's DDP for comparison, and the four policies."""
    return (
        *(f"solo-{rank}" for rank in range(num_devices)),
        DDP,
        *(f"cpu-{policy}" for policy in TRAINING_POLICIES),
    )


def run_demo(task: Task, *, devices: tuple[DeviceSpec, ...], output: Path, watcher: Watcher) -> Demo:
    """Run all modes, one after the other, each in its own processes and its own folder under `output`."""
    names = demo_modes(len(devices))
    _check_unused(output, names)
    results: dict[str, ModeResult] = {}
    for position, name in enumerate(names):
        mode = parse_mode(name, num_devices=len(devices))
        taking_part = devices if mode.solo_rank is None else devices[mode.solo_rank : mode.solo_rank + 1]
        watcher.begin(name, devices=[str(spec) for spec in taking_part], position=position, num_modes=len(names))
        results[name] = run_mode(
            mode, task, devices=devices, run_dir=output / name, as_published=False, on_message=watcher.saw
        )
        watcher.end(results[name])
    return Demo(task=task, devices=devices, output=output, results=results)


def default_output(now: datetime) -> Path:
    return Path("runs") / f"demo-{now:%Y%m%d-%H%M%S}"


def finished_modes(output: Path, num_devices: int) -> list[str]:
    """The modes whose runs under `output` came to their end: the model is the last thing a run writes."""
    return [name for name in demo_modes(num_devices) if (output / name / "model.safetensors").is_file()]


def _check_unused(output: Path, names: Sequence[str]) -> None:
    for name in names:
        if (output / name).exists():
            raise ConfigError(f"{output / name} is there already", hint="pass --output with a folder of its own")


# Text


def conditions(task: Task) -> str:
    """What is trained, in lines of 80 columns."""
    epochs = f"{task.epochs} epoch{'' if task.epochs == 1 else 's'}"
    return (
        f"{task.name} on {task.data_name}: {epochs} of {len(task.dataset):,} samples,\n"
        f"batch {task.batch_size} per rank (in {DEFAULT_POLICY} and balanced: of all ranks),\n"
        f"the same seed and order in every mode; {DEFAULT_POLICY} is the default policy"
    )


def rank_words(devices: Sequence[DeviceSpec]) -> str:
    """One line: what a rank is here."""
    threads = threads_per_rank(devices, num_cores())
    counts = sorted({count for count, spec in zip(threads, devices, strict=True) if spec.kind == "cpu"})
    words = " or ".join(f"{count} thread{'' if count == 1 else 's'}" for count in counts)
    if all(spec.kind == "cpu" for spec in devices):
        return f"each device is a CPU rank with {words}"
    return f"each device is a rank{f', a CPU rank has {words}' if words else ''}"


def crowding(devices: Sequence[DeviceSpec], cores: int) -> str | None:
    """The note if ranks have to share a core."""
    num_cpu_ranks = sum(spec.kind == "cpu" for spec in devices)
    if num_cpu_ranks <= cores:
        return None
    return f"{num_cpu_ranks} CPU ranks share {cores} core{'' if cores == 1 else 's'}: expect less than the ideal"


def busy_words(part: float | None) -> str | None:
    """The warning if other programs use this part of the processors."""
    if part is None or part < BUSY_PART:
        return None
    return f"other programs use {part:.0%} of the processors: expect lower and less regular numbers"


def next_steps(demo: Demo) -> str:
    """What to try after the demo, a command in each line."""
    return "\n".join(
        [
            f"next: outrider timeline {demo.output / f'cpu-{DEFAULT_POLICY}'}  (device by device)",
            "next: outrider diagnose  (what your own devices would gain)",
            "next: outrider init my-project  (a project to start from)",
        ]
    )


def render(demo: Demo) -> str:
    """The table and its reading, for 80 columns."""
    headers = ("mode", "samples/s", "efficiency", "speed-up", "accuracy", _target_header(demo.task), "waiting")
    rows = [_row(mode, demo.summary(mode)) for mode in demo.results]
    return "\n".join([text_table(headers, rows), "", *_reading(demo)])


def _target_header(task: Task) -> str:
    return "to target" if task.target is None else f"to {task.target:.0%}"


def _row(mode: str, summary: Summary) -> list[str]:
    return [
        mode,
        number(summary.samples_per_s, ",.0f"),
        UNKNOWN if mode.startswith("solo-") else number(summary.efficiency, ".2f"),
        number(summary.speedup, ".2f") + "x",
        number(summary.eval, ".1%"),
        UNKNOWN if summary.time_to_target_s is None else f"{summary.time_to_target_s:.1f} s",
        number(summary.wait_fraction, ".0%"),
    ]


def _reading(demo: Demo) -> list[str]:
    solos = " + ".join(f"solo-{rank}" for rank in range(len(demo.devices)))
    warm_up = "the first epoch left out" if demo.task.epochs > 1 else "warm-up included"
    return [
        f"ideal: {number(demo.ideal, ',.0f')} samples/s ({solos}); efficiency is measured against it,",
        f"speed-up against {SOLO}; samples/s of training time, {warm_up}",
        f"to {number(demo.task.target, '.0%')}: training time until an epoch's evaluation first reached it;",
        "one seed and whole epochs, of which another seed takes two more or less",
        *(f"{mode}: {spec} rested, since sharing such short steps with it is slower" for mode, spec in _rested(demo)),
        f"data: {demo.task.data_name}; {rank_words(demo.devices)}",
        f"runs: {demo.output}/<mode>",
    ]


def _rested(demo: Demo) -> list[tuple[str, DeviceSpec]]:
    """The ranks that had almost nothing to do in the last epoch of a policy that lets devices rest."""
    rested = []
    for mode in (f"cpu-{DEFAULT_POLICY}", "cpu-balanced"):
        shares = demo.results[mode].epochs[-1].share_by_rank
        rested += [(mode, spec) for spec, share in zip(demo.devices, shares, strict=True) if share < RESTING_SHARE]
    return rested


def document(demo: Demo) -> dict[str, Any]:
    """The demo for programs."""
    shown = [mode for mode in demo.results if mode == SOLO or not mode.startswith("solo-")]
    return {
        "schema_version": SCHEMA_VERSION,
        "devices": [str(spec) for spec in demo.devices],
        "ideal_samples_per_s": _rounded(demo.ideal, 1),
        "modes": {mode: _mode_document(demo.summary(mode)) for mode in shown},
    }


def _mode_document(summary: Summary) -> dict[str, Any]:
    return {
        "samples_per_s": _rounded(summary.samples_per_s, 1),
        "efficiency": _rounded(summary.efficiency, 4),
        "speedup": _rounded(summary.speedup, 4),
        "eval": _rounded(summary.eval, 6),
        "time_to_target_s": _rounded(summary.time_to_target_s, 3),
        "averages": summary.averages,
        "exposed_average_fraction": _rounded(summary.exposed_average_fraction, 6),
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
