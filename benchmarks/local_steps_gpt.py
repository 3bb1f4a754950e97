"""What local steps teach a GPT of 10.9 million parameters: two devices of speeds 1 and 0.4 in virtual time, on one GPU.

`corpus` writes the text: bytes of the Python sources in wheels of fixed versions, which it downloads and compares with
their hashes; one file in 25 is held out. `run` finds the best rate of the fast device alone on a seed that is not
reported, then trains every cell of `grid` with three seeds. `cadence` and `async` are the policies' own code under the
lab's virtual clock, at a fixed anchor; delayed Nesterov is algorithm 3 of arXiv 2401.09135; averages have the
arithmetic of `outrider.average`. T, the time of all runs in steps of the fast device, is chosen before the first
loss is known, so that the grid ends in `--limit-s`. One JSON line per cell. `table` writes what each gains in time: how
long the fast device alone trains to the same loss, by a run with its own schedule for each length, over the time
that both took. `--grid targets` trains `cadence` for T with tuned windows and averages that take time.

    python benchmarks/local_steps_gpt.py corpus carry/python_bytes.npz
    python benchmarks/local_steps_gpt.py run records.jsonl --corpus carry/python_bytes.npz --limit-s 540
    python benchmarks/local_steps_gpt.py table records.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flat_gpt import FlatGpt, Shape, build, compiled_blocks_agree
from local_steps_runs import LIMIT, SPEEDS, Cell, OutOfTime, Setting, Trainer, run_cell
from local_steps_table import SEED_OF_RATES, table

SEEDS = (0, 1, 2)
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
LENGTHS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4)
"""Of the runs alone, in T."""


# The grid


WINDOWS = {1: 2, 2: 5, 8: 20, 24: 60}
"""By anchor; an anchor of 1 is planned as 2 or 3 steps of the fast device."""


def grid() -> Iterator[Cell]:
    """Cells of one seed, most informative first."""
    for length in LENGTHS:
        yield Cell(kind="alone", length=length)
    for anchor, window in WINDOWS.items():
        yield Cell(kind="cadence", anchor=anchor, window=window)
    for anchor in (1, 2, 8):
        yield Cell(kind="async", anchor=anchor, window=WINDOWS[anchor])
    for window in (5, 20, 60):
        yield Cell(kind="delayed", window=window, momentum=0.5)
    for anchor in (2, 8, 24):
        yield Cell(kind="cadence", anchor=anchor, window=WINDOWS[anchor], momentum="auto")
    for anchor in (2, 8):
        yield Cell(kind="cadence", anchor=anchor, window=WINDOWS[anchor], averages_state=True)
    for rate in (1.0, 0.5):
        yield Cell(kind="late", rate=rate)
    for window in (20, 60):
        yield Cell(kind="delayed", window=window, momentum=0.9, outer_rate=0.7)
    yield Cell(kind="delayed", window=5, momentum=0.2)
    yield Cell(kind="cadence", anchor=2, window=5, momentum=0.2)
    yield Cell(kind="cadence", anchor=2, window=5, rate=round(math.sqrt(LIMIT**2 / sum(s * s for s in SPEEDS)), 3))


TARGETS = (0.1, 0.05, 0.03, 0.02, 0.01)
COSTS = (4.0, 1.6, 0.5)
"""Of an average, in steps of the fast device: GPT-2 small over nccl and cpu (docs/results/large), and a cheap one."""


def grid_of_targets() -> Iterator[Cell]:
    """What `cadence` learns in T, by the part of the time that averages may take."""
    for length in (1.0, 0.85, 1.2):
        yield Cell(kind="alone", length=length)
    for target in TARGETS:
        for cost in COSTS:
            yield Cell(kind="cadence", target=target, cost=cost)


GRIDS = {"policies": grid, "targets": grid_of_targets}


def all_cells(wishes: argparse.Namespace) -> list[Cell]:
    cells = [replace(cell, seed=seed) for cell in GRIDS[wishes.grid]() for seed in wishes.seeds]
    return [cell for cell in cells if wishes.targets is None or cell.target in wishes.targets]


# Several cells at once


Replicas = Sequence[FlatGpt]


def on_all(slots: Sequence[Replicas], job: Callable[[Replicas], None]) -> None:
    """Run the job for every slot, each in a thread with a stream of its own."""

    def work(replicas: Replicas) -> None:
        if replicas[0].device.type != "cuda":
            job(replicas)
            return
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            job(replicas)
            stream.synchronize()

    if slots[0][0].device.type == "cuda":
        torch.cuda.synchronize()  # The threads' streams do not wait for what was queued before.
    threads = [threading.Thread(target=work, args=(replicas,)) for replicas in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_cells(cells: Sequence[Cell], setting: Setting, slots: Sequence[Replicas], output: Path) -> list[dict[str, Any]]:
    """The records of cells that ended in time; each is written when it ends."""
    left, records, lock = deque(cells), [], threading.Lock()

    def job(replicas: Replicas) -> None:
        while True:
            with lock:
                if not left or time.monotonic() > setting.deadline_s:
                    return
                cell = left.popleft()
            began_s = time.monotonic()
            try:
                record = run_cell(cell, setting, replicas)
            except OutOfTime:
                return
            except Exception as error:
                record = {**asdict(cell), "error": f"{type(error).__name__}: {error}"[:500]}
            record["seconds"] = round(time.monotonic() - began_s, 2)
            with lock:
                records.append(record)
                write(output, record)

    on_all(slots, job)
    return records


def write(output: Path, record: dict[str, Any]) -> None:
    with output.open("a") as file:
        file.write(json.dumps(record, separators=(",", ":")) + "\n")
    print(json.dumps(record), flush=True)


def steps_per_s(slots: Sequence[Replicas], setting: Setting, *, steps: int) -> float:
    """Of all slots together."""
    cell = Cell(kind="cadence", length=steps / setting.ticks)

    def job(replicas: Replicas) -> None:
        trainer = Trainer(cell, setting, replicas)
        for number in range(steps):
            trainer.step(number % len(replicas), number, number)

    on_all(slots, job)
    began_s = time.monotonic()
    on_all(slots, job)
    return len(slots) * steps / (time.monotonic() - began_s)


def find_best_rate(setting: Setting, slots: Sequence[Replicas], output: Path) -> float:
    """The best power-of-two rate of the fast device alone in T steps; the grid grows until it is not at an end."""
    losses: dict[float, float] = {}
    wanted = list(RATES)
    while wanted and len(losses) < 8:
        cells = [Cell(kind="alone", length=1.0, rate=rate, seed=SEED_OF_RATES) for rate in wanted]
        for record in run_cells(cells, replace(setting, best_rate=1.0), slots, output):
            losses[record["rate"]] = record.get("loss") or math.inf
        if not losses:
            raise SystemExit("no time to find a rate: pass fewer --ticks")
        best = min(losses, key=losses.__getitem__)
        wanted = [rate for rate in (best / 2, best * 2) if rate not in losses]
    return best


def run(wishes: argparse.Namespace) -> None:
    began_s = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() and not wishes.tiny else "cpu")
    shape = Shape(width=32, num_heads=2, num_blocks=2, context=32, batch_size=4) if wishes.tiny else Shape()
    with np.load(wishes.corpus) as parts:
        sizes = [len(parts["train"]), len(parts["test"])]
        text = torch.from_numpy(np.concatenate([parts["train"], parts["test"]])).to(device)
    train, test = text.split(sizes)
    is_compiled = device.type == "cuda" and not wishes.plain and compiled_blocks_agree(shape, text)
    slots = [build(shape, text, count=len(SPEEDS), is_compiled=is_compiled) for _ in range(wishes.slots)]
    deadline_s = began_s + wishes.limit_s
    setting = Setting(shape=shape, train=train, test=test, ticks=1_000, best_rate=1e-3, deadline_s=deadline_s)
    trial = 20 if wishes.tiny else 200
    speeds = {"one slot": steps_per_s(slots[:1], setting, steps=trial), "all": steps_per_s(slots, setting, steps=trial)}
    cells = all_cells(wishes)
    left_s = deadline_s - time.monotonic() - 10
    lengths = sum(cell.length for cell in cells) + len(RATES) + 1
    affordable = int(0.88 * left_s * speeds["all"] / lengths) // 50 * 50
    setting = replace(setting, ticks=wishes.ticks or min(2_400, max(200, affordable)))
    about = {
        "kind": "setup",
        "shape": asdict(shape),
        "parameters": slots[0][0].values.numel(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "is_compiled": is_compiled,
        "steps_per_s": {name: round(speed, 1) for name, speed in speeds.items()},
        "corpus_bytes": sizes,
        "ticks": setting.ticks,
        "setup_s": round(time.monotonic() - began_s, 1),
    }
    write(wishes.path, about)
    best = wishes.rate or find_best_rate(setting, slots, wishes.path)
    run_cells(cells, replace(setting, best_rate=best), slots, wishes.path)
    print(f"{time.monotonic() - began_s:.0f} s")


# The corpus


def make_corpus(path: Path) -> None:
    """Write the bytes of both parts."""
    from language_model import HELD_OUT, source_texts

    with tempfile.TemporaryDirectory(prefix=f"outrider-{os.getpid()}-") as folder:
        texts = [text.encode() for text in source_texts(Path(folder))]
    train = b"\0".join(text for number, text in enumerate(texts) if number % HELD_OUT)
    test = b"\0".join(texts[::HELD_OUT])
    np.savez_compressed(path, train=np.frombuffer(train, np.uint8), test=np.frombuffer(test, np.uint8))
    print(f"{len(texts)} files, {len(train):,} bytes to train with, {len(test):,} held out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("corpus", "table"):
        commands.add_parser(name).add_argument("path", type=Path)
    running = commands.add_parser("run")
    running.add_argument("path", type=Path)
    running.add_argument("--corpus", type=Path, required=True)
    running.add_argument("--grid", choices=list(GRIDS), default="policies")
    running.add_argument("--targets", nargs="+", type=float, help="only the cells of the grid with these targets")
    running.add_argument("--rate", type=float, help="of the fast device alone, found by an earlier call")
    running.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    running.add_argument("--ticks", type=int, default=0, help="T; by default what fits into the limit")
    running.add_argument("--limit-s", type=float, default=540.0, help="end after so many seconds")
    running.add_argument("--slots", type=int, default=4, help="cells that run at once")
    running.add_argument("--plain", action="store_true", help="do not compile the model's blocks")
    running.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to try the script")
    wishes = parser.parse_args()
    if wishes.command == "corpus":
        make_corpus(wishes.path)
    elif wishes.command == "run":
        run(wishes)
    else:
        table(wishes.path)


if __name__ == "__main__":
    main()
