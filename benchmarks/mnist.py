"""The runs behind the MNIST tables: every mode and every peer on `cpu,cpu@0.4`, three seeds.

    python benchmarks/mnist.py DATA [--output runs/mnist] [--models lenet,mlp] [--cores 0-11]

A model and a seed are one sweep. Sweeps run beside each other, each on two cores that are its own, so that its runs are
timed; it goes on where it stopped. Then: outrider bench report runs/mnist --html
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console

from outrider.bench.datasets.source import DataSource
from outrider.bench.suite.plan import SMALL_PAIR, Request, plan, runnable_modes
from outrider.bench.suite.sweep import run_sweep
from outrider.cli.bench_progress import PlainSweep
from outrider.machine.devices import parse_devices

MODELS = ("lenet", "conv-ae", "mlp", "logistic")
"""Those that take longest first."""
NUM_SEEDS = 3
CORES_EACH = 2


def sweep(model: str, seed: int, *, data: str, output: Path, cores: Sequence[int], max_samples: int | None) -> None:
    """In a process of its own: the cores are the process's, and its ranks inherit them."""
    os.sched_setaffinity(0, cores)
    devices = parse_devices(SMALL_PAIR)
    request = Request(
        models=(model,),
        modes=tuple(name for name in runnable_modes(devices) if name != "graph-sync"),
        devices=devices,
        data=DataSource(folder=data, may_download=False, may_stand_in=False),
        num_seeds=NUM_SEEDS,
        max_samples={} if max_samples is None else {model: max_samples},
    )
    planned = [one for one in plan(request) if one.case.seed == seed]
    watcher = PlainSweep([one.case for one in planned], Console(stderr=True, highlight=False, soft_wrap=True))
    run_sweep(planned, output=output, watcher=watcher)
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
    places: SimpleQueue[tuple[int, ...]] = SimpleQueue()
    starts = range(first, last + 2 - CORES_EACH, CORES_EACH)
    for start in starts:
        places.put(tuple(range(start, start + CORES_EACH)))
    spawn = multiprocessing.get_context("spawn")

    def run(model: str, seed: int) -> None:
        cores = places.get()
        settings = {"data": options.data, "output": options.output, "max_samples": options.max_samples}
        process = spawn.Process(target=sweep, args=(model, seed), kwargs=settings | {"cores": cores})
        process.start()
        process.join()
        places.put(cores)

    with ThreadPoolExecutor(len(starts)) as pool:
        jobs = [pool.submit(run, model, seed) for model in options.models.split(",") for seed in range(NUM_SEEDS)]
    for job in jobs:
        job.result()


if __name__ == "__main__":
    main()
