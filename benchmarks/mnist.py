"""The runs behind the MNIST tables: every mode and every peer on `cpu,cpu@0.4`, three seeds.

    python benchmarks/mnist.py DATA [--output runs/mnist] [--models lenet,mlp] [--cores 0-11]

Runs go on beside each other, each on two cores that are its own, so that it is timed: the round of the first seed
before that of the second. The script goes on where it stopped. Then: outrider bench report runs/mnist --html
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path

from rich.console import Console

from outrider.bench.datasets.source import DataSource
from outrider.bench.suite.run_case import Planned
from outrider.bench.suite.suite_plan import SMALL_PAIR, SuiteRequest, plan, runnable_modes
from outrider.bench.suite.sweep import in_rounds, run_sweep
from outrider.cli.bench_progress import PlainSweep
from outrider.machine.devices import parse_devices

MODELS = ("lenet", "conv-ae", "mlp", "logistic")
"""Those that take longest first."""
NUM_SEEDS = 3
CORES_EACH = 2


def planned_runs(models: Sequence[str], *, data: str, max_samples: int | None) -> list[Planned]:
    devices = parse_devices(SMALL_PAIR)
    request = SuiteRequest(
        models=tuple(models),
        modes=tuple(name for name in runnable_modes(devices) if name != "graph-sync"),
        devices=devices,
        data=DataSource(folder=data, may_download=False, may_stand_in=False),
        num_seeds=NUM_SEEDS,
        max_samples={} if max_samples is None else dict.fromkeys(models, max_samples),
    )
    return in_rounds(plan(request))


def take_place(places: Queue[tuple[int, ...]]) -> None:
    """A process of the pool keeps its cores, and its ranks inherit them."""
    os.sched_setaffinity(0, places.get())


def run(planned: Planned, *, output: Path) -> None:
    watcher = PlainSweep([planned.case], Console(stderr=True, highlight=False, soft_wrap=True))
    run_sweep([planned], output=output, watcher=watcher)
    watcher.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="the folder that holds mnist")
    parser.add_argument("--output", type=Path, default=Path("runs/mnist"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cores", default=f"0-{(os.cpu_count() or 2) - 1}", help="first and last, as 0-11")
    parser.add_argument("--max-samples", type=int, help="a part of the data, to try the script")
    options = parser.parse_args()
    first, last = map(int, options.cores.split("-"))
    starts = range(first, last + 2 - CORES_EACH, CORES_EACH)
    spawn = multiprocessing.get_context("spawn")
    places: Queue[tuple[int, ...]] = spawn.Queue()
    for start in starts:
        places.put(tuple(range(start, start + CORES_EACH)))
    todo = planned_runs(options.models.split(","), data=options.data, max_samples=options.max_samples)
    with ProcessPoolExecutor(len(starts), mp_context=spawn, initializer=take_place, initargs=(places,)) as pool:
        list(pool.map(partial(run, output=options.output), todo))


if __name__ == "__main__":
    main()
