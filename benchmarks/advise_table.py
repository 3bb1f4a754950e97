"""How far off is `outrider advise`? Its forecast beside real runs of the suite's models, policy by policy.

A cell is one model on one pair of devices: a forecast, a run in each policy, all runs again in the opposite order, and
a second forecast, so that a machine that becomes slower meanwhile affects both alike. Each forecast is compared with
the mean of both runs; how far these are apart is the noise of the machine. One JSON line per cell, flushed as it ends;
cells that the file has are skipped, so the command goes on where it stopped. With `--cell-s` the runs are as long as
fits: a cell then takes about so many seconds. The command `table` writes the tables of docs/results/advise.

    python benchmarks/advise_table.py run records.jsonl --data runs/data
    python benchmarks/advise_table.py run records.jsonl --data runs/data --pairs cuda:0%70,cuda:0%28
    python benchmarks/advise_table.py table records.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import outrider
from outrider.bench.datasets.source import DataSource
from outrider.bench.tasks import Task
from outrider.bench.zoo import suite_task
from outrider.virtual.advice import SOLO, Advice

RATIOS = (2.5, 10.0, 1.2)
"""Speed of the fast device over that of the slow one."""
PAIRS = tuple(f"cpu,cpu@{1 / ratio:.4g}" for ratio in RATIOS)
SAMPLES = {"lenet": 20_000, "mlp": 60_000, "gpt-nano": 512, "conv-ae": 12_000, "char-rnn": 512, "logistic": 60_000}
"""Of each model's data."""
POLICIES = ("auto", "sync", "balanced", "cadence", "async")
LEAST_RUN_S = 3.0
START_S = 2.5
"""What a run takes besides its training."""
Way = tuple[tuple[str, ...], str]
"""Devices and policy."""
LIMIT = 0.03
"""An advised policy counts as right if it is the best measured one or this close to it."""


def options_of(task: Task, devices: str) -> dict[str, Any]:
    return {
        "batch_size": task.batch_size,
        "epochs": 1_000,
        "scheduler": task.scheduler,
        "augment": task.augment,
        "max_grad_norm": task.max_grad_norm,
        "devices": devices,
        "threads_per_rank": 1,
        "checkpoint_every": None,
        "seed": task.seed,
    }


def measured(task: Task, devices: str, policy: str, seconds: float) -> list[tuple[int, float]]:
    """Samples and seconds of each epoch of a real run that is stopped after so many seconds of training."""
    with tempfile.TemporaryDirectory() as folder:
        options = options_of(task, devices) | {"policy": policy, "run_dir": Path(folder) / "run"}
        with outrider.train(task.model, task.optimizer, task.step, task.dataset, **options) as run:
            # The record is written when all ranks are about to train.
            while run.is_running and not (Path(folder) / "run" / "record.json").exists():
                time.sleep(0.05)
            time.sleep(seconds)
            run.stop()
            epochs = list(run)
    return [(epoch.samples, round(epoch.seconds, 3)) for epoch in epochs]


def sums(epochs: Sequence[tuple[int, float]]) -> tuple[int, float]:
    return sum(samples for samples, _ in epochs), round(sum(seconds for _, seconds in epochs), 3)


def rate_of(epochs: Sequence[tuple[int, float]]) -> float:
    samples, seconds = sums(epochs)
    return samples / seconds


class Lengths:
    """How long each run of a cell trains: so long each, or as fits into the rest of the cell's time."""

    def __init__(self, run_s: float, *, cell_s: float | None) -> None:
        self._run_s, self._began_s = run_s, time.perf_counter()
        self._end_s = None if cell_s is None else self._began_s + cell_s
        self._advised_s = self._starts_s = 0.0
        self._num_runs = 0

    def advised(self) -> float:
        """Call once the first forecast is there; the second one is assumed to take as long, and a little more."""
        advised_s = time.perf_counter() - self._began_s
        self._advised_s = 1.1 * advised_s
        return advised_s

    def next_run(self, num_left: int) -> float:
        """Seconds of the next of so many runs; what runs before it took to start, it takes too."""
        if self._end_s is None:
            return self._run_s
        return max(LEAST_RUN_S, (self._end_s - self._advised_s - time.perf_counter()) / num_left - self._start_s)

    @property
    def _start_s(self) -> float:
        return self._starts_s / self._num_runs if self._num_runs else START_S

    def took(self, whole_s: float, run_s: float) -> None:
        self._starts_s += whole_s - run_s
        self._num_runs += 1

    def allows_forecast(self) -> bool:
        return self._end_s is None or self._end_s - time.perf_counter() > 0.8 * self._advised_s

    def allows_run(self) -> bool:
        return self._end_s is None or self._end_s - time.perf_counter() > 1.3 * (LEAST_RUN_S + self._start_s)


def cell(task: Task, devices: str, *, trial_s: float, run_s: float, cell_s: float | None = None) -> dict[str, Any]:
    """Two forecasts, and between them two runs of each row that has both devices or one; fewer if its time is over."""
    load, lengths = os.getloadavg()[0], Lengths(run_s, cell_s=cell_s)

    def advise() -> Advice:
        options = options_of(task, devices)
        return outrider.advise(task.model, task.optimizer, task.step, task.dataset, seconds=trial_s, **options)

    advices = [advise()]
    advised_s = lengths.advised()
    print(f"{task.name} on {devices}: advised in {advised_s:.0f} s", flush=True)
    ways = [(one.devices, one.policy) for one in advices[0].cells]
    runs: dict[Way, list[list[tuple[int, float]]]] = {way: [] for way in ways}
    order, runs_s = (*ways, *reversed(ways)), []
    for number, way in enumerate(order):
        if not lengths.allows_run():
            break
        runs_s.append(lengths.next_run(len(order) - number))
        policy, began_s = "sync" if way[1] == SOLO else way[1], time.perf_counter()
        runs[way].append(measured(task, ",".join(way[0]), policy, runs_s[-1]))
        lengths.took(time.perf_counter() - began_s, runs_s[-1])
        said = f"{rate_of(runs[way][-1]):,.2f} samples/s in {runs_s[-1]:.1f} s"
        print(f"{task.name} on {','.join(way[0])}, {way[1]}: {said}", flush=True)
    if lengths.allows_forecast():
        advices.append(advise())
    rates = {way: [rate_of(epochs) for epochs in both] for way, both in runs.items()}
    forecasts = [{(one.devices, one.policy): one.samples_per_s for one in each.cells} for each in advices]
    rows = [
        {
            "devices": list(way[0]),
            "policy": way[1],
            "forecasts": [round(each[way], 2) for each in forecasts],
            "measured": [round(rate, 2) for rate in rates[way]],
            "errors": [round(each[way] / mean(rates[way]) - 1, 4) for each in forecasts],
            # Of a run of many epochs only the first and the others together.
            "epochs": [epochs if len(epochs) < 4 else [epochs[0], sums(epochs[1:])] for epochs in runs[way]],
        }
        for way in ways
        if rates[way]
    ]
    return {
        "model": task.name,
        "devices": devices,
        "batch_size": task.batch_size,
        "parameters": advices[0].parameters,
        "advised": [{"policy": one.best.policy, "devices": list(one.best.devices)} for one in advices],
        "rows": rows,
        "trial_s": trial_s,
        "run_s": round(mean(runs_s), 1),
        "spreads": [round(one.spread or 0.0, 4) for one in advices],
        "advise_s": round(advised_s, 1),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "version": outrider.__version__,
    }


def run(
    output: Path,
    *,
    data: Path,
    models: list[str],
    pairs: list[str],
    batch_size: int | None,
    trial_s: float,
    run_s: float,
    cell_s: float | None,
    max_samples: int | None,
) -> None:
    done = {(one["model"], one["devices"]) for one in read(output)}
    # Pair by pair: a table that was cut short has all models.
    for devices in pairs:
        for model in models:
            source = DataSource(folder=data, may_download=False, max_samples=max_samples or SAMPLES.get(model))
            task = suite_task(model, data=source, epochs=1, seed=0)
            task = replace(task, batch_size=batch_size or task.batch_size)
            if (task.name, devices) in done:
                continue
            record = cell(task, devices, trial_s=trial_s, run_s=run_s, cell_s=cell_s)
            with output.open("a") as file:
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
            print(
                f"{model} on {devices}: "
                + ", ".join(f"{row['policy']} {shown(row['errors'])}" for row in record["rows"]),
                flush=True,
            )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# The table


def shown(errors: Sequence[float]) -> str:
    return ", ".join(f"{100 * error:+.0f}" for error in errors) + " %"


def apart(row: dict[str, Any]) -> float:
    """How far two runs of the same row are apart."""
    return max(row["measured"]) / min(row["measured"]) - 1


def losses_of_advice(record: dict[str, Any]) -> list[float]:
    """How much faster the best measured row is than the advised one, for each forecast."""
    rates = {(tuple(row["devices"]), row["policy"]): mean(row["measured"]) for row in record["rows"]}
    return [
        max(rates.values()) / rates[tuple(advised["devices"]), advised["policy"]] - 1 for advised in record["advised"]
    ]


def table(records: list[dict[str, Any]]) -> str:
    """Worst first."""
    rows = [row for record in records for row in record["rows"]]
    errors = [abs(error) for row in rows for error in row["errors"]]
    losses = [loss for record in records for loss in losses_of_advice(record)]
    noise = [apart(row) for row in rows]
    lines = [
        f"{len(records)} cells, {len(errors)} forecasts: worst error {max(errors):.1%}, median {median(errors):.1%}; "
        f"two runs of the same kind are {median(noise):.1%} apart in the median, {max(noise):.1%} at worst; "
        f"the advised policy is the best or within {LIMIT:.0%} of it in {sum(loss <= LIMIT for loss in losses)} of "
        f"{len(losses)} cases.",
        "",
        "| model | devices | " + " | ".join(("fast solo", "slow solo", *POLICIES)) + " | runs apart | advised | lost |",
        "| --- | --- |" + " ---: |" * (3 + len(POLICIES)) + " --- | ---: |",
    ]
    for record in sorted(records, key=worst, reverse=True):
        cells = [shown(row["errors"]) for row in record["rows"]]
        noisy = f"{median(map(apart, record['rows'])):.0%}"
        names = [one["policy"] if one["policy"] != SOLO else f"solo {one['devices'][0]}" for one in record["advised"]]
        lost = ", ".join(f"{100 * loss:.0f}" for loss in losses_of_advice(record)) + " %"
        name = ", ".join(dict.fromkeys(names))
        lines.append(f"| {record['model']} | `{record['devices']}` | {' | '.join(cells)} | {noisy} | {name} | {lost} |")
    return "\n".join(lines)


def worst(record: dict[str, Any]) -> float:
    return max(abs(error) for row in record["rows"] for error in row["errors"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("output", type=Path)
    running.add_argument("--data", type=Path, required=True)
    running.add_argument("--models", default=",".join(SAMPLES))
    running.add_argument("--pairs", nargs="+", default=list(PAIRS), help="Device lists, one per pair.")
    running.add_argument("--batch-size", type=int, help="In place of the suite's, whose steps may be long on a CPU.")
    running.add_argument("--trial-s", type=float, default=4.0)
    running.add_argument("--run-s", type=float, default=10.0)
    running.add_argument("--cell-s", type=float, help="In place of --run-s: about how long a cell may take.")
    running.add_argument("--samples", type=int, help="Of each model's data, in place of the table's own numbers.")
    commands.add_parser("table").add_argument("output", type=Path)
    given = parser.parse_args()
    if given.command == "table":
        print(table(read(given.output)))
        return
    run(
        given.output,
        data=given.data,
        models=given.models.split(","),
        pairs=given.pairs,
        batch_size=given.batch_size,
        trial_s=given.trial_s,
        run_s=given.run_s,
        cell_s=given.cell_s,
        max_samples=given.samples,
    )


if __name__ == "__main__":
    main()
