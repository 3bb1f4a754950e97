"""How far off is `outrider advise`? Its forecast beside real runs of the suite's models, policy by policy.

A cell is one model on one pair of devices: the forecast, then a run in each policy, one after the other, so that both
see the same machine. One JSON line per cell, flushed as it ends; cells that the file has are skipped, so the command
goes on where it stopped. The command `table` writes the tables of docs/results/advise from the file.

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
from pathlib import Path
from statistics import median
from typing import Any

import outrider
from outrider.bench.datasets.source import DataSource
from outrider.bench.tasks import Task
from outrider.bench.zoo import suite_task
from outrider.virtual.advice import SOLO

RATIOS = (2.5, 10.0, 1.2)
"""Speed of the fast device over that of the slow one."""
PAIRS = tuple(f"cpu,cpu@{1 / ratio:.4g}" for ratio in RATIOS)
SAMPLES = {"lenet": 20_000, "mlp": 60_000, "gpt-nano": 512, "conv-ae": 12_000, "char-rnn": 512, "logistic": 60_000}
"""Of each model's data."""
POLICIES = ("auto", "sync", "balanced", "cadence", "async")
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


def measured(task: Task, devices: str, policy: str, seconds: float) -> float:
    """Samples per second of a real run that is stopped after so many seconds of training."""
    with tempfile.TemporaryDirectory() as folder:
        options = options_of(task, devices) | {"policy": policy, "run_dir": Path(folder) / "run"}
        with outrider.train(task.model, task.optimizer, task.step, task.dataset, **options) as run:
            # The record is written when all ranks are about to train.
            while run.is_running and not (Path(folder) / "run" / "record.json").exists():
                time.sleep(0.05)
            time.sleep(seconds)
            run.stop()
            epochs = list(run)
    return sum(epoch.samples for epoch in epochs) / sum(epoch.seconds for epoch in epochs)


def cell(task: Task, devices: str, *, trial_s: float, run_s: float) -> dict[str, Any]:
    """The forecast, then a run of each of its rows that has both devices or one."""
    began_s, load = time.perf_counter(), os.getloadavg()[0]
    advice = outrider.advise(
        task.model, task.optimizer, task.step, task.dataset, seconds=trial_s, **options_of(task, devices)
    )
    advised_s = time.perf_counter() - began_s
    rows = []
    for one in advice.cells:
        policy = "sync" if one.policy == SOLO else one.policy
        rate = measured(task, ",".join(one.devices), policy, run_s)
        rows.append(
            {
                "devices": list(one.devices),
                "policy": one.policy,
                "forecast": round(one.samples_per_s, 2),
                "measured": round(rate, 2),
                "error": round(one.samples_per_s / rate - 1, 4),
            }
        )
    return {
        "model": task.name,
        "devices": devices,
        "batch_size": task.batch_size,
        "parameters": advice.parameters,
        "advised": {"policy": advice.best.policy, "devices": list(advice.best.devices)},
        "rows": rows,
        "trial_s": trial_s,
        "run_s": run_s,
        "advise_s": round(advised_s, 1),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "version": outrider.__version__,
    }


def run(output: Path, *, data: Path, models: list[str], pairs: list[str], trial_s: float, run_s: float) -> None:
    done = {(one["model"], one["devices"]) for one in read(output)}
    # Pair by pair: a table that was cut short has all models.
    for devices in pairs:
        for model in models:
            source = DataSource(folder=data, may_download=False, max_samples=SAMPLES.get(model))
            task = suite_task(model, data=source, epochs=1, seed=0)
            if (task.name, devices) in done:
                continue
            record = cell(task, devices, trial_s=trial_s, run_s=run_s)
            with output.open("a") as file:
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
            print(f"{model} on {devices}: " + ", ".join(f"{r['policy']} {r['error']:+.0%}" for r in record["rows"]))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# The table


def loss_of_advice(record: dict[str, Any]) -> float:
    """How much faster the best measured row is than the advised one."""
    rows = record["rows"]
    [own] = [
        row["measured"]
        for row in rows
        if row["policy"] == record["advised"]["policy"] and row["devices"] == record["advised"]["devices"]
    ]
    return max(row["measured"] for row in rows) / own - 1


def table(records: list[dict[str, Any]]) -> str:
    """Worst first."""
    errors = [abs(row["error"]) for record in records for row in record["rows"]]
    right = sum(loss_of_advice(record) <= LIMIT for record in records)
    lines = [
        f"{len(records)} cells, {len(errors)} forecasts: worst error {max(errors):.1%}, median {median(errors):.1%}; "
        f"the advised policy is the best or within {LIMIT:.0%} of it in {right} of {len(records)} cells.",
        "",
        "| model | devices | " + " | ".join(("fast solo", "slow solo", *POLICIES)) + " | advised | best is faster by |",
        "| --- | --- |" + " ---: |" * (2 + len(POLICIES)) + " --- | ---: |",
    ]
    for record in sorted(records, key=lambda one: -max(abs(row["error"]) for row in one["rows"])):
        shown = [f"{row['error']:+.1%}" for row in record["rows"]]
        advised = record["advised"]
        name = advised["policy"] if advised["policy"] != SOLO else f"solo {advised['devices'][0]}"
        lost = f"{loss_of_advice(record):.1%}"
        lines.append(f"| {record['model']} | `{record['devices']}` | {' | '.join(shown)} | {name} | {lost} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("output", type=Path)
    running.add_argument("--data", type=Path, required=True)
    running.add_argument("--models", default=",".join(SAMPLES))
    running.add_argument("--pairs", nargs="+", default=list(PAIRS), help="Device lists, one per pair.")
    running.add_argument("--trial-s", type=float, default=4.0)
    running.add_argument("--run-s", type=float, default=10.0)
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
        trial_s=given.trial_s,
        run_s=given.run_s,
    )


if __name__ == "__main__":
    main()
