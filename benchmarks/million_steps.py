"""One run with a million steps of a tiny model: does memory stay constant, and can everything it leaves be read?

Trains with `outrider.train()` on two CPU ranks and samples the resident memory of the starter and of the ranks every
second. Afterwards it reads every file, adds up the samples of the timeline, and writes a compact record.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import outrider
from outrider.record.run_record import commit
from outrider.timeline.document import load_timeline
from outrider.timeline.timeline_summary import summarize

MEBI = 2**20
SAMPLE_EVERY_S = 1.0
MOMENTS = (0.1, 0.5, 1.0)


class Tiny(nn.Module):
    """Four weights: what a step costs is the framework, not the model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.mv(inputs, self.weight)


class PlainSgd(torch.optim.Optimizer):
    """SGD without the hooks and profiler marks of torch's own, which cost more than such a step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])

    step.hooked = True  # type: ignore[attr-defined]


class MemoryLog:
    """The resident memory of this process and of its ranks over the run."""

    def __init__(self, pids: tuple[int, ...]) -> None:
        self._processes = [psutil.Process(os.getpid()), *(psutil.Process(pid) for pid in pids)]
        self.rows: list[list[float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemoryLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_S):
            try:
                self.rows.append([process.memory_info().rss / MEBI for process in self._processes])
            except psutil.NoSuchProcess:
                return

    def at(self, part: float) -> dict[str, float]:
        """Mebibytes of each process when this part of the samples had been taken."""
        row = self.rows[min(len(self.rows) - 1, round(part * len(self.rows)))]
        names = ("starter", *(f"rank {rank}" for rank in range(len(row) - 1)))
        return {name: round(value, 1) for name, value in zip(names, row, strict=True)}


def start(options: argparse.Namespace, folder: Path) -> outrider.Run:
    """`steps` batches in all, over some epochs."""
    num_samples = options.steps * options.batch_size // options.epochs
    inputs = torch.randn(num_samples, 4)
    more = {"anchor": options.anchor, "max_anchor": options.anchor} if options.anchor else {}
    return outrider.train(
        Tiny,
        PlainSgd,
        lambda model, batch: model(batch[0]).mean(),
        (inputs,),
        batch_size=options.batch_size,
        epochs=options.epochs,
        devices=options.devices,
        policy=options.policy,
        run_dir=folder,
        **more,
    )


def read_back(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Read every file that a person or a tool would; what does not fit together ends this program."""
    timeline = load_timeline(folder)
    ranks = summarize(timeline)
    num_samples = options.steps * options.batch_size // options.epochs * options.epochs
    assert sum(rank.samples for rank in ranks) == num_samples, "the timeline lost samples"
    record = json.loads((folder / "record.json").read_text())
    assert record["status"] == "finished"
    assert len(record["epochs"]) == options.epochs
    json.loads((folder / "trace.json").read_text())
    with (folder / "timeline.csv").open(newline="") as file:
        rows = sum(1 for _ in csv.DictReader(file))
    return {
        "steps": sum(rank.batches for rank in ranks),
        "averages": record["totals"]["averages"],
        "averages_in_the_timeline": [rank.averages for rank in ranks],
        "train_s": round(record["totals"]["train_s"], 1),
        "events": len(timeline.events),
        "rows_of_the_table": rows,
        "bytes": {name: _size(folder / name) for name in sorted(os.listdir(folder)) if name != "plotly.min.js"},
    }


def _size(path: Path) -> int:
    return sum(one.stat().st_size for one in path.iterdir()) if path.is_dir() else path.stat().st_size


def environment() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "num_cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "outrider": outrider.__version__,
        "commit": commit(),
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    started_s = time.perf_counter()
    run = start(options, folder)
    assert isinstance(run, outrider.api.handle.StartedRun), "start this program by itself, not under torchrun"
    with MemoryLog(run.ranks.pids) as memory:
        for metrics in run:
            print(f"epoch {metrics.epoch}: {metrics.seconds:.1f} s, MiB {memory.at(1.0)}", flush=True)
    asked = {name: getattr(options, name) for name in ("steps", "epochs", "batch_size", "devices", "policy", "anchor")}
    return {
        "schema_version": 1,
        "asked": asked,
        "environment": environment(),
        "wall_s": round(time.perf_counter() - started_s, 1),
        "memory_samples": len(memory.rows),
        "rss_mib": {f"{part:.0%}": memory.at(part) for part in MOMENTS},
        "found": read_back(folder, options),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1_000_000, help="batches in all, of both ranks together")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--devices", default="cpu,cpu@0.5")
    parser.add_argument("--policy", default="cadence")
    parser.add_argument("--anchor", type=int, help="batches of the slowest rank in a window, for cadence and async")
    parser.add_argument("--folder", type=Path, help="keep the run there; by default it is removed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the record")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(options, options.folder or Path(temporary) / "run")
    text = json.dumps(found, indent=1)
    print(text)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
