"""Is a second device ever a loss? `auto` on a pair of CPU ranks against the fast one alone, as real runs.

A group is one model, length and seed: one device alone and the pairs, one after the other on the same two cores. Lanes
of two cores each take groups until the time is over. One JSON line per run, flushed as it ends. The command `table`
writes the table of docs/results/auto.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from typing import Any

import torch

import outrider
from outrider.bench.datasets.cifar10 import parse_batch
from outrider.bench.datasets.source import DataSource
from outrider.bench.statistics import student_interval
from outrider.bench.tasks import Task
from outrider.bench.zoo import suite_task

RATIOS = (1.2, 2.5, 10.0)
"""Speed of the fast device over that of the slow one."""


@dataclass(frozen=True)
class Size:
    """How much of a model's data is used, so that a group takes minutes at most."""

    samples: int
    longest: int = 20
    """Epochs: one, the suite's five, four times that, as far as time allows."""
    depth: int = 20


SIZES = {
    "gpt-nano": Size(512, longest=5),
    "char-rnn": Size(512, longest=5),
    "resnet20": Size(2_560, depth=8),
    "lenet": Size(20_000),
    "mlp": Size(60_000),
    "conv-ae": Size(12_000),
    "logistic": Size(60_000),
}
"""Those that take longest first."""


@dataclass(frozen=True)
class Group:
    model: str
    epochs: int
    seed: int


def groups() -> Iterator[Group]:
    """Two seeds of short runs, one of long ones, then more seeds until the time is over."""
    for seed, lengths in ((0, (5, 1)), (1, (5, 1)), (0, (20,)), *((seed, (5, 1)) for seed in range(2, 12))):
        for epochs, (model, size) in product(lengths, SIZES.items()):
            if epochs <= size.longest:
                yield Group(model, epochs, seed)


def task_of(group: Group, data: Path) -> Task:
    size = SIZES[group.model]
    source = DataSource(folder=data, may_download=False, max_samples=size.samples)
    return suite_task(group.model, data=source, epochs=group.epochs, seed=group.seed, depth=size.depth)


def images(path: Path, start: int, stop: int) -> Any:
    """A part of one file of CIFAR-10, for a machine without the rest."""
    pixels, labels = parse_batch(path.read_bytes())
    return torch.utils.data.TensorDataset(pixels[start:stop], labels[start:stop])


def run(group: Group, *, ratio: float | None, data: Path) -> dict[str, Any]:
    task, samples = task_of(group, data), SIZES[group.model].samples
    dataset, eval_dataset = task.dataset, task.eval_dataset
    if group.model.startswith("resnet"):
        path = data / "data_batch_1.bin"
        dataset, eval_dataset = images(path, 0, samples), images(path, 8_000, 10_000)
    with tempfile.TemporaryDirectory() as folder:
        started_s = time.perf_counter()
        trained = outrider.train(
            task.model,
            task.optimizer,
            task.step,
            dataset,
            batch_size=task.batch_size,
            epochs=group.epochs,
            evaluate=task.evaluate,
            eval_dataset=eval_dataset,
            scheduler=task.scheduler,
            augment=task.augment,
            max_grad_norm=task.max_grad_norm,
            devices="cpu" if ratio is None else f"cpu,cpu@{1 / ratio:.4f}",
            threads_per_rank=1,
            seed=group.seed,
            run_dir=Path(folder) / "run",
        ).join()
        wall_s = time.perf_counter() - started_s
        timeline = json.loads((Path(folder) / "run" / "timeline.json").read_text())
    choices = [event for event in timeline["events"] if event["kind"] == "policy" and event["rank"] == 0]
    return {
        "model": task.name,
        "samples": samples,
        "epochs": group.epochs,
        "seed": group.seed,
        "ratio": ratio,
        "larger_is_better": task.larger_is_better,
        "train_s": round(trained.epochs[-1].train_s, 4),
        "wall_s": round(wall_s, 2),
        "curve": [[round(epoch.train_s, 4), round(epoch.eval or 0.0, 5)] for epoch in trained.epochs],
        "share": [round(share, 3) for share in trained.epochs[-1].share_by_rank],
        "choices": [event["value"] for event in choices],
    }


def run_lane(
    cores: tuple[int, int], work: Any, output: Path, data: Path, until_s: float, ratios: Sequence[float]
) -> None:
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    while time.time() < until_s:
        try:
            group = work.get(timeout=1.0)
        except Empty:
            return
        ways = [None, *ratios]
        for ratio in ways[group.seed % len(ways) :] + ways[: group.seed % len(ways)]:
            record = run(group, ratio=ratio, data=data)
            with output.open("a") as file:
                file.write(json.dumps(record, separators=(",", ":")) + "\n")


def run_all(
    output: Path, *, data: Path, seconds: float, cores: list[int], wanted: Sequence[Group], ratios: Sequence[float]
) -> None:
    """All lanes at once, each on two cores of its own; what is under way when the time is over is ended."""
    context = get_context("spawn")
    work = context.Queue()
    for group in wanted:
        work.put(group)
    until_s = time.time() + seconds
    pairs = list(zip(cores[::2], cores[1::2], strict=False))
    lanes = [context.Process(target=run_lane, args=(pair, work, output, data, until_s, ratios)) for pair in pairs]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join(max(0.1, until_s - time.time()))
        if lane.is_alive():
            lane.terminate()


def spin(core: int, seconds: float, counts: Any, place: int) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    one = torch.ones(256, 256)
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        one @ one
        counts[place] += 1


def interference(first: int, second: int, seconds: float = 2.0) -> float:
    """How much of its speed a core has while another one is busy: 1 where they share nothing."""
    context = get_context("spawn")
    done = []
    for cores in ((first,), (first, second)):
        counts = context.Array("l", 2)
        spinning = [context.Process(target=spin, args=(core, seconds, counts, n)) for n, core in enumerate(cores)]
        for process in spinning:
            process.start()
        for process in spinning:
            process.join()
        done.append(counts[0])
    return done[1] / done[0]


# The table


def time_to(curve: list[list[float]], value: float, *, larger: bool) -> float | None:
    """When a run reaches a value, with straight lines between the evaluations at the ends of epochs."""
    sign = 1.0 if larger else -1.0
    before: list[float] | None = None
    for at_s, reached in curve:
        if sign * reached >= sign * value:
            if before is None or reached == before[1]:
                return at_s
            return before[0] + (at_s - before[0]) * (value - before[1]) / (reached - before[1])
        before = [at_s, reached]
    return None


def cells(records: list[dict[str, Any]]) -> dict[tuple[str, int, float], list[dict[str, float]]]:
    """Pairs of runs with the same seed: time and result of the pair against one device."""
    alone = {(one["model"], one["epochs"], one["seed"]): one for one in records if one["ratio"] is None}
    found: dict[tuple[str, int, float], list[dict[str, float]]] = defaultdict(list)
    for one in records:
        solo = alone.get((one["model"], one["epochs"], one["seed"]))
        if one["ratio"] is None or solo is None:
            continue
        larger = one["larger_is_better"]
        result, target = one["curve"][-1][1], solo["curve"][-1][1]
        reached_s = time_to(one["curve"], target, larger=larger)
        found[one["model"], one["epochs"], one["ratio"]].append(
            {
                "time": solo["train_s"] / one["train_s"],
                "to_result": solo["train_s"] / reached_s if reached_s else float("nan"),
                "better": (result - target) if larger else (target - result),
                "relative": ((result - target) if larger else (target - result)) / abs(target),
            }
        )
    return found


def around(values: list[float], *, digits: int = 2) -> str:
    interval = student_interval(values)
    middle = sum(values) / len(values)
    spread = "" if interval is None else f" ± {(interval.high - interval.low) / 2:.{digits}f}"
    return f"{middle:.{digits}f}{spread}"


def table(path: Path) -> str:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [
        "| model | epochs | r | n | same samples, × as fast | one device's result, × as soon | result, relative |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (model, epochs, ratio), pairs in sorted(cells(records).items()):
        soon = [pair["to_result"] for pair in pairs if pair["to_result"] == pair["to_result"]]
        reached = f"{around(soon)} ({len(soon)} of {len(pairs)})" if soon else f"– (0 of {len(pairs)})"
        lines.append(
            f"| `{model}` | {epochs} | {ratio:g} | {len(pairs)} | {around([pair['time'] for pair in pairs])} "
            f"| {reached} | {around([pair['relative'] for pair in pairs], digits=4)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    everything = commands.add_parser("all")
    everything.add_argument("output", type=Path)
    everything.add_argument("data", type=Path)
    everything.add_argument("--seconds", type=float, default=540.0)
    everything.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    everything.add_argument("--epochs", nargs="+", type=int, default=[1, 5, 20])
    everything.add_argument("--seeds", type=int, default=12)
    everything.add_argument("--ratios", nargs="+", type=float, default=RATIOS)
    shown = commands.add_parser("table")
    shown.add_argument("records", type=Path)
    options = parser.parse_args()
    if options.command == "table":
        print(table(options.records))
        return
    cores = sorted(os.sched_getaffinity(0))
    kept = interference(cores[0], cores[1])
    print(f"beside a busy neighbour a core keeps {kept:.2f} of its speed")
    wanted = [
        group
        for group in groups()
        if group.model in options.models and group.epochs in options.epochs and group.seed < options.seeds
    ]
    run_all(
        options.output,
        wanted=wanted,
        data=options.data,
        seconds=options.seconds,
        ratios=options.ratios,
        cores=cores if kept > 0.85 or len(cores) < 4 else cores[::2],
    )


if __name__ == "__main__":
    main()
