"""`auto` on pairs of CPU ranks at the suite's real lengths, which are too long to run: simulated from measured costs.

Steps of each model are measured on this machine, alone and shared by two ranks, in batches of two sizes; the simulator
runs `auto` with these costs over one epoch, the suite's epochs and four times as many. `measure` writes the costs, one
JSON line per model. `table` prints gains over the fast device alone; `check` compares simulated with real runs of
auto_table.py on the same machine.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from auto_table import RATIOS, SIZES, cells

from outrider.api.options import make_order
from outrider.api.train import start
from outrider.bench.datasets.source import DataSource
from outrider.bench.tasks import Task
from outrider.bench.zoo import ENTRIES, entry_named, suite_task
from outrider.policy.window_planner import PlannerConfig
from outrider.virtual.simulator import DeviceSpeed, MeasuredCosts, Network, Scenario, simulate
from outrider.virtual.trial_reports import (
    ALONE,
    TrialReports,
    count_reports,
    device_speed,
    meeting_cost,
    read_trial,
    steps_of,
    stretch_speed,
)

MODELS = tuple(ENTRIES)
SMALLER = 4
"""The second size of batch is the suite's divided by this."""
TRIAL_S, REPORTS = 4.0, 14
NUM_TRAINED = {"mnist": 60_000, "shakespeare": 7_842, "cifar10": 50_000}
LONGER = 4
NUM_SEEDS = 5
SIMULATED_STEPS = 20_000
"""A longer run goes on as it did up to here."""


def trial(task: Task, devices: str, batch_size: int) -> TrialReports:
    """A short run with equal batches; on one device it reports each half second."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        required = {"model": task.model, "optimizer": task.optimizer, "step": task.step, "dataset": task.dataset}
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "epochs": 1_000,
            "augment": task.augment,
            "max_grad_norm": task.max_grad_norm,
            "devices": devices,
            "policy": "sync",
            "threads_per_rank": 1,
            "checkpoint_every": None,
            "quiet": True,
            "run_dir": folder,
        }
        with start(make_order(required, options), is_trial=True) as run:
            while not count_reports(folder):
                run.poll()
                time.sleep(0.05)
            began_s = time.monotonic()
            while time.monotonic() - began_s < TRIAL_S or count_reports(folder) < REPORTS:
                run.poll()
                time.sleep(0.05)
            run.stop()
            for _ in run:
                pass
        return read_trial(folder, policy="sync", devices=devices.split(","))


def measure(name: str, data: Path) -> dict[str, Any]:
    entry = entry_named(name)
    source = DataSource(folder=data, may_download=False, max_samples=1_024)
    task = suite_task(name, data=source, epochs=1, seed=0)
    sizes = (entry.batch_size, max(2, entry.batch_size // SMALLER))
    alone = [trial(task, "cpu", size).of_kind(ALONE) for size in sizes]
    shared = [trial(task, "cpu,cpu", size).of_kind("shared") for size in sizes]
    costs = [meeting_cost(reports) for reports in shared]
    steps = [step for reports in shared for step in steps_of(reports, 0)]
    return {
        "model": name,
        "batch_size": entry.batch_size,
        "alone": asdict(stretch_speed(alone)),
        "shared": asdict(device_speed(steps, overhead_ms=min(cost.overhead_ms for cost in costs))),
        "average_ms": round(median(cost.average_ms for cost in costs), 4),
    }


def slower(speed: dict[str, float], ratio: float) -> DeviceSpeed:
    return DeviceSpeed(
        per_sample_ms=speed["per_sample_ms"] * ratio, fixed_ms=speed["fixed_ms"] * ratio, jitter=speed["jitter"]
    )


def gain(costs: dict[str, Any], *, num_samples: int, epochs: int, ratio: float) -> float:
    """Time of the fast device alone over that of `auto` on the pair, mean over seeds of step times that vary."""
    return fmean(
        _gain(costs, num_samples=num_samples, epochs=epochs, ratio=ratio, seed=seed) for seed in range(NUM_SEEDS)
    )


def _gain(costs: dict[str, Any], *, num_samples: int, epochs: int, ratio: float, seed: int) -> float:
    batch_size = costs["batch_size"]
    # The end of an epoch is not simulated: `auto` goes on where it was, and evaluations are not counted as training.
    total = num_samples * epochs
    simulated = min(total, SIMULATED_STEPS * batch_size)
    shared = tuple(slower(costs["shared"], r) for r in (1.0, ratio))
    alone = tuple(slower(costs["alone"], r) for r in (1.0, ratio))
    average_ms = costs["average_ms"]
    scenario = Scenario(
        speeds=alone,
        network=Network(),
        num_samples=simulated,
        batch_size=batch_size,
        global_batch_size=batch_size,
        planner=PlannerConfig(world_size=2, batch_size=batch_size, is_blocking=True),
        measured=MeasuredCosts(local=alone, shared=shared, average_ms=average_ms, gradient_ms=average_ms),
        samples_after=total - simulated,
        seed=seed,
    )
    outcome = simulate("auto", scenario)
    whole, rest = divmod(simulated, batch_size)
    fast = DeviceSpeed(per_sample_ms=alone[0].per_sample_ms, fixed_ms=alone[0].fixed_ms)
    # The mean of steps that vary as measured.
    mean = math.exp(alone[0].jitter ** 2 / 2)
    one_s = (whole * fast.step_ms(batch_size) + (fast.step_ms(rest) if rest else 0.0)) * mean / 1e3
    return one_s / outcome.wall_s


def ceiling(costs: dict[str, Any], ratio: float) -> float:
    """The best split of a batch without averages, over the fast device alone."""
    fast, slow = (slower(costs["shared"], r) for r in (1.0, ratio))
    batch_size = costs["batch_size"]
    best_ms = min(max(fast.step_ms(n), slow.step_ms(batch_size - n)) for n in range(1, batch_size))
    return slower(costs["alone"], 1.0).step_ms(batch_size) / best_ms


def table(measured: list[dict[str, Any]]) -> Iterable[str]:
    yield "| model | step, ms | fixed part | sum, ms | r | ceiling of exact steps | 1 epoch | suite | 4 × |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for costs in measured:
        entry = entry_named(costs["model"])
        alone = DeviceSpeed(**costs["alone"])
        step_ms = alone.step_ms(costs["batch_size"])
        head = f"| `{costs['model']}` | {step_ms:.1f} | {alone.fixed_ms / step_ms:.2f} | {costs['average_ms']:.2f} |"
        for ratio in RATIOS:
            gains = [
                gain(costs, num_samples=NUM_TRAINED[entry.data], epochs=epochs, ratio=ratio)
                for epochs in (1, entry.epochs, LONGER * entry.epochs)
            ]
            listed = " | ".join(f"{one:.2f}" for one in gains)
            yield f"{head} {ratio:g} | {max(1.0, ceiling(costs, ratio)):.2f} | {listed} |"


def check(measured: list[dict[str, Any]], records: list[dict[str, Any]]) -> Iterable[str]:
    """Simulated beside real runs of the same model, number of samples and epochs."""
    by_name = {costs["model"]: costs for costs in measured}
    yield "| model | epochs | r | n | real | simulated |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for (model, epochs, ratio), pairs in sorted(cells(records).items()):
        if model in by_name:
            real = sum(pair["time"] for pair in pairs) / len(pairs)
            ours = gain(by_name[model], num_samples=SIZES[model].samples, epochs=epochs, ratio=ratio)
            yield f"| `{model}` | {epochs} | {ratio:g} | {len(pairs)} | {real:.2f} | {ours:.2f} |"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("costs", type=Path)
    measuring.add_argument("data", type=Path)
    measuring.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    commands.add_parser("table").add_argument("costs", type=Path)
    checking = commands.add_parser("check")
    checking.add_argument("costs", type=Path)
    checking.add_argument("records", type=Path, help="of auto_table.py, on this machine")
    given = parser.parse_args()
    if given.command == "table":
        print("\n".join(table(read(given.costs))))
    elif given.command == "check":
        print("\n".join(check(read(given.costs), read(given.records))))
    else:
        torch.set_num_threads(1)
        for name in given.models:
            with given.costs.open("a") as file:
                file.write(json.dumps(measure(name, given.data), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
