"""What local steps teach a GPT of 10.9 million parameters: two devices of speeds 1 and 0.4 in virtual time, on one GPU.

`corpus` writes the text: bytes of the Python sources in wheels of fixed versions, which it downloads and compares with
their hashes; one file in 25 is held out. `run` finds the best rate of the fast device alone on a seed that is not
reported, then trains every cell of `grid` with three seeds. `cadence` and `async` are the policies' own code under the
lab's virtual clock, at a fixed anchor; delayed Nesterov is algorithm 3 of arXiv 2401.09135; averages have the
arithmetic of `outrider.average`. T, the time of all runs in steps of the fast device, is chosen before the first
loss is known, so that the grid ends in `--limit-s`. One JSON line per cell. `table` writes what each gains in time: how
long the fast device alone trains to the same loss, by a run with its own schedule for each length, over the time
that both took.

    python benchmarks/local_steps_gpt.py corpus carry/python_bytes.npz
    python benchmarks/local_steps_gpt.py run records.jsonl --corpus carry/python_bytes.npz --limit-s 540
    python benchmarks/local_steps_gpt.py table records.jsonl
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flat_gpt import FlatGpt, Shape, batches_of, build, compiled_blocks_agree, initial_values, part_of_rate
from torch import Tensor

from outrider.average.outer import Outer
from outrider.policy.batch_splitter import Splitter
from outrider.policy.effects import Batch, Lease, Seat
from outrider.policy.ledger import Ledger
from outrider.policy.policies import open_policy
from outrider.policy.policy_chooser import PolicyChooser
from outrider.policy.window_planner import PlannerConfig, WindowPlanner
from outrider.virtual.virtual_clock import Costs, VirtualClock

SPEEDS = (1.0, 0.4)
LIMIT = sum(SPEEDS)
MAX_OVERSHOOT = 4
"""Of `async`, as by default."""
RECENT = 0.9
"""Decay, per average, of the samples from which the ranks' shares are computed; as in `outrider.average.exchange`."""
SEEDS = (0, 1, 2)
SEED_OF_RATES = 99
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
LENGTHS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4)
"""Of the runs alone, in T."""
NUM_EVAL_BATCHES = 64
PACE = 64
"""The host waits for the device every so many steps."""
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
"""Student's t, 97.5 %, by number of values."""


# The grid


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run; `anchor` is the number of steps of the slow device between averages, `window` that of the fast one."""

    kind: str
    """alone, late (gradients of shared steps, applied one step late), cadence, async or delayed."""
    length: float = LIMIT
    """Batches of all devices, in T."""
    anchor: int = 0
    window: int = 0
    momentum: float | str | None = None
    """Of the outer Nesterov step."""
    outer_rate: float = 1.0
    averages_state: bool = False
    rate: float = 1.0
    """Relative to the best."""
    seed: int = 0


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


def all_cells(seeds: Sequence[int]) -> list[Cell]:
    return [replace(cell, seed=seed) for cell in grid() for seed in seeds]


# Runs


class OutOfTime(Exception):
    """The deadline has passed; the cell is not written."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all cells of a study share."""

    shape: Shape
    train: Tensor
    test: Tensor
    ticks: int
    """T."""
    best_rate: float
    deadline_s: float


class Trainer:
    """Takes steps of a cell on replicas that share a stream, and lets the host run ahead of the device by a little."""

    def __init__(self, cell: Cell, setting: Setting, replicas: Sequence[FlatGpt]) -> None:
        self.cell, self.setting = cell, setting
        self.num_batches = round(cell.length * setting.ticks)
        self.replicas = replicas
        self.starts = batches_of(len(setting.train), setting.shape, self.num_batches, seed=cell.seed + 10)
        self.starts = self.starts.to(setting.train.device)
        self._steps = 0
        self._before: torch.cuda.Event | None = None
        values = initial_values(setting.shape, cell.seed)
        for replica in replicas:
            replica.start(values)

    def rate(self, tick: int) -> float:
        return self.setting.best_rate * self.cell.rate * part_of_rate(tick, ticks=self.num_batches)

    def step(self, rank: int, batch: int, tick: int) -> None:
        self.replicas[rank].gradient(self.starts[batch])
        self.replicas[rank].update(self.rate(tick))
        self.keep_pace()

    def keep_pace(self) -> None:
        self._steps += 1
        if self._steps % PACE:
            return
        if time.monotonic() > self.setting.deadline_s:
            raise OutOfTime
        if self.starts.device.type == "cuda":
            if self._before is not None:
                self._before.synchronize()
            self._before = torch.cuda.Event()
            self._before.record()

    def held_out_loss(self) -> float:
        setting = self.setting
        starts = batches_of(len(setting.test), setting.shape, NUM_EVAL_BATCHES, seed=5)
        return self.replicas[0].mean_loss(starts.to(setting.test.device) + len(setting.train))


class Averages:
    """The work of the virtual clock: steps of a trainer, and averages with the arithmetic of `outrider.average`."""

    def __init__(self, trainer: Trainer, outer: Outer, *, averages_state: bool) -> None:
        self.trainer, self.outer = trainer, outer
        names = ("exp_avg", "exp_avg_sq") if averages_state else ()
        self.own = [
            {"values": one.values.detach(), **{name: one.state[name] for name in names}} for one in trainer.replicas
        ]
        self.ref = {name: tensor.clone() for name, tensor in self.own[0].items()}
        self.snapshots = [{name: tensor.clone() for name, tensor in one.items()} for one in self.own]
        self.velocity = torch.zeros_like(self.ref["values"]) if outer.has_velocity else None
        self.recent = [0.0] * len(self.own)
        self.ahead = 0.0
        self.count = 0

    def step(self, rank: int, batch: Batch, at: int) -> None:
        for number in range(batch.start, batch.stop):
            self.trainer.step(rank, number, at)

    @torch.no_grad()
    def snapshot(self, rank: int) -> None:
        for name, tensor in self.own[rank].items():
            self.snapshots[rank][name].copy_(tensor)

    @torch.no_grad()
    def settle(self, samples: Sequence[int]) -> None:
        if not sum(samples):
            return
        self.count += 1
        self.recent = [RECENT * old + new for old, new in zip(self.recent, samples, strict=True)]
        concentration = sum((own / sum(self.recent)) ** 2 for own in self.recent)
        for name, ref in self.ref.items():
            delta = torch.zeros_like(ref)
            for snapshot, own in zip(self.snapshots, samples, strict=True):
                delta.add_(snapshot[name] - ref, alpha=own / sum(samples))
            if name == "values":
                self.outer.step(ref, delta, self.velocity, concentration=concentration)
                self.ahead = float(self.outer.look_ahead(concentration))
            else:
                ref.add_(delta)

    @torch.no_grad()
    def load(self, rank: int) -> None:
        for name, tensor in self.own[rank].items():
            tensor.copy_(self.ref[name])

    @torch.no_grad()
    def correct(self, rank: int) -> None:
        for name, tensor in self.own[rank].items():
            tensor.add_(self.ref[name] - self.snapshots[rank][name])

    @torch.no_grad()
    def move_to_average(self) -> None:
        if self.velocity is not None:
            for one in self.own:
                one["values"].sub_(self.velocity, alpha=self.ahead)

    def loss(self, rank: int) -> tuple[float, int]:
        return 0.0, 0

    def _refuse(self, *_: Any) -> None:
        raise AssertionError("local steps neither share gradients nor hand over")

    gradient = share_gradients = merge = hand_over = _refuse


def run_policy(trainer: Trainer) -> dict[str, Any]:
    """`cadence` or `async`, one segment; an average of `async` takes half a window."""
    cell, count, size = trainer.cell, trainer.num_batches, len(SPEEDS)
    outer = Outer() if cell.momentum is None else Outer(kind="nesterov", momentum=cell.momentum)  # type: ignore[arg-type]
    work = Averages(trainer, outer, averages_state=cell.averages_state)
    is_blocking = cell.kind == "cadence"
    config = PlannerConfig(world_size=size, batch_size=1, anchor=cell.anchor, is_blocking=is_blocking)
    policies = [
        open_policy(
            cell.kind,
            Seat(rank, size, 1),
            Lease(0, count),
            planner=WindowPlanner(config),
            splitter=Splitter(world_size=size),
            max_overshoot=MAX_OVERSHOOT,
            samples_after=0,
            chooser=PolicyChooser(world_size=size),
        )
        for rank in range(size)
    ]
    costs = Costs(
        step_ms=lambda rank, samples: samples / SPEEDS[rank],
        average_ms=0.0 if is_blocking else cell.window / 2,
        gradient_ms=0.0,
    )
    clock = VirtualClock(policies, costs=costs, ledger=Ledger(0, count), batch_size=1, work=work)
    clock.run()
    work.move_to_average()
    return {"time": max(own.now_ms for own in clock.clocks), "averages": work.count}


@torch.no_grad()
def run_delayed(trainer: Trainer) -> dict[str, Any]:
    """Asynchronous local SGD: no rank waits; the server takes in each displacement when it arrives.

    The buffer has one displacement per rank, the momentum is used when it is full (c = 0), and a rank takes steps in
    proportion to its speed (DyLU).
    """
    cell, num_ranks = trainer.cell, len(SPEEDS)
    goals = [max(1, round(cell.window * speed)) for speed in SPEEDS]
    own = [replica.values.detach() for replica in trainer.replicas]
    server = _Server(own[0].clone(), buffer_size=num_ranks, momentum=float(cell.momentum or 0), rate=cell.outer_rate)
    begun = [tensor.clone() for tensor in own]
    done, next_batch, last_s = [0] * num_ranks, 0, 0.0
    events = [(0.0, rank) for rank in range(num_ranks)]
    heapq.heapify(events)
    while events:
        now, rank = heapq.heappop(events)
        is_over = next_batch == trainer.num_batches
        if done[rank] == goals[rank] or (is_over and done[rank]):
            server.receive(begun[rank] - own[rank])
            own[rank].copy_(server.values)
            begun[rank].copy_(server.values)
            done[rank], last_s = 0, max(last_s, now)
        if not is_over:
            trainer.step(rank, next_batch, next_batch)
            next_batch, done[rank] = next_batch + 1, done[rank] + 1
            heapq.heappush(events, (now + 1 / SPEEDS[rank], rank))
    own[0].copy_(server.values)
    return {"time": last_s, "averages": server.received}


class _Server:
    """Delayed Nesterov, algorithm 3 of arXiv 2401.09135 with c = 0; gradients point against the displacement."""

    def __init__(self, values: Tensor, *, buffer_size: int, momentum: float, rate: float) -> None:
        self.values, self.size, self.momentum, self.rate = values, buffer_size, momentum, rate
        self.velocity, self.buffer = torch.zeros_like(values), torch.zeros_like(values)
        self.received = 0

    def receive(self, gradient: Tensor) -> None:
        self.received += 1
        self.buffer.add_(gradient)
        self.values.sub_(gradient, alpha=self.rate / self.size)
        if self.received % self.size == 0:
            self.velocity.mul_(self.momentum).add_(self.buffer, alpha=1 / self.size)
            self.values.sub_(self.velocity, alpha=self.rate * self.momentum)
            self.buffer.zero_()


def run_alone(trainer: Trainer) -> dict[str, Any]:
    for batch in range(trainer.num_batches):
        trainer.step(0, batch, batch)
    return {"time": float(trainer.num_batches), "averages": 0}


@torch.no_grad()
def run_late(trainer: Trainer) -> dict[str, Any]:
    """Every gradient is applied one step after the parameters that it belongs to; the first step applies none."""
    replica = trainer.replicas[0]
    held = torch.zeros_like(replica.slope)
    for batch in range(trainer.num_batches):
        replica.gradient(trainer.starts[batch])
        fresh = replica.slope.clone()
        if batch:
            replica.slope.copy_(held)
            replica.update(trainer.rate(batch))
        held.copy_(fresh)
        trainer.keep_pace()
    return {"time": trainer.num_batches / LIMIT, "averages": 0}


RUNS: dict[str, Callable[[Trainer], dict[str, Any]]] = {
    "alone": run_alone,
    "late": run_late,
    "cadence": run_policy,
    "async": run_policy,
    "delayed": run_delayed,
}


def run_cell(cell: Cell, setting: Setting, replicas: Sequence[FlatGpt]) -> dict[str, Any]:
    is_pair = cell.kind not in ("alone", "late")
    trainer = Trainer(cell, setting, replicas if is_pair else replicas[:1])
    result = RUNS[cell.kind](trainer)
    loss = trainer.held_out_loss()
    return {
        **asdict(cell),
        "ticks": setting.ticks,
        "best_rate": setting.best_rate,
        "batches": trainer.num_batches,
        **result,
        "loss": round(loss, 5) if math.isfinite(loss) else None,
    }


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
    cells = all_cells(wishes.seeds)
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
    best = find_best_rate(setting, slots, wishes.path)
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


# The table


def table(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["kind"] == "setup":
            print(json.dumps(row), end="\n\n")
    for error in [row for row in rows if "error" in row]:
        print(f"failed: {json.dumps(error)}\n")
    done = [row for row in rows if "loss" in row]
    _rates([row for row in done if row["seed"] == SEED_OF_RATES])
    own = [row for row in done if row["seed"] != SEED_OF_RATES]
    alone = _runs_alone([row for row in own if row["kind"] == "alone"])
    _gains([row for row in own if row["kind"] != "alone"], alone)


def _rates(rows: Sequence[dict[str, Any]]) -> None:
    print("| rate | loss, the fast device alone, one seed that is not used below |\n| ---: | ---: |")
    for row in sorted(rows, key=lambda row: row["rate"]):
        print(f"| {row['rate']:g} | {_number(row['loss'])} |")


def _runs_alone(rows: Sequence[dict[str, Any]]) -> dict[int, dict[float, float]]:
    """Print the losses of the fast device alone; returns them by seed and length."""
    alone: dict[int, dict[float, float]] = {}
    for row in rows:
        if row["loss"] is not None:
            alone.setdefault(row["seed"], {})[row["length"]] = row["loss"]
    print("\n| the fast device alone, length in T | n | loss |\n| ---: | ---: | ---: |")
    for length in sorted({length for own in alone.values() for length in own}):
        losses = [own[length] for own in alone.values() if length in own]
        print(f"| {length:g} | {len(losses)} | {interval(losses, 4)} |")
    return alone


COLUMNS = (
    "",
    "window",
    "n",
    "loss",
    "− alone for as long",
    f"gain in time (limit {LIMIT:g})",
    "worth of a sample",
    "time, in T",
    "averages",
)


def _gains(rows: Sequence[dict[str, Any]], alone: dict[int, dict[float, float]]) -> None:
    print("\n| " + " | ".join(COLUMNS) + " |\n| --- | ---: |" + " ---: |" * (len(COLUMNS) - 2))
    exact = [own[LIMIT] - own[1.0] for own in alone.values() if LIMIT in own and 1.0 in own]
    if exact:
        losses = [own[LIMIT] for own in alone.values() if LIMIT in own]
        print(
            f"| exact sharing | – | {len(exact)} | {interval(losses, 4)} | {interval(exact, 4)} | {LIMIT:g} | 1 | 1 | |"
        )
    for label, window in dict.fromkeys((_label(row), row["window"]) for row in rows):
        own = [row for row in rows if (_label(row), row["window"]) == (label, window) and row["seed"] in alone]
        good = [row for row in own if row["loss"] is not None]
        if len(good) < len(own) or not own:
            print(f"| {label} | {window or '–'} | {len(own)} | diverged in {len(own) - len(good)} | | | | | |")
            continue
        times = [row["time"] / row["ticks"] for row in own]
        reached = [_time_alone(alone[row["seed"]], row["loss"]) for row in own]
        same = [row["loss"] - _loss_alone(alone[row["seed"]], t) for row, t in zip(own, times, strict=True)]
        sign = _bound(alone, own)
        cells = [
            label,
            str(window or "–"),
            str(len(own)),
            interval([row["loss"] for row in own], 4),
            interval(same, 4),
            sign + interval([one / t for one, t in zip(reached, times, strict=True)], 2),
            sign + interval([one * row["ticks"] / row["batches"] for one, row in zip(reached, own, strict=True)], 2),
            f"{np.mean(times):.3f}",
            f"{np.mean([row['averages'] for row in own]):.0f}",
        ]
        print("| " + " | ".join(cells) + " |")


def _label(row: dict[str, Any]) -> str:
    name = {"late": "shared steps, gradients one step late", "delayed": "delayed Nesterov"}.get(
        row["kind"], row["kind"]
    )
    words = [f"`{name}`" if row["kind"] in ("cadence", "async") else name]
    if row["kind"] == "async":
        words.append("averages half a window late")
    if row["momentum"] is not None:
        words.append(
            f"momentum {row['momentum']}" + (f", outer rate {row['outer_rate']:g}" if row["outer_rate"] != 1 else "")
        )
    words += ["AdamW's state averaged"] if row["averages_state"] else []
    words += [f"rate × {row['rate']:g}"] if row["rate"] != 1 else []
    return ", ".join(words)


def _time_alone(alone: dict[float, float], loss: float) -> float:
    """How long the fast device alone trains to this loss, in T; straight between runs, and at most the longest."""
    lengths = sorted(alone)
    # Falling losses: a longer run that ended worse counts like the shorter one before it.
    losses = np.minimum.accumulate([alone[length] for length in lengths])
    return float(np.interp(-loss, -losses, lengths))


def _loss_alone(alone: dict[float, float], length: float) -> float:
    lengths = sorted(alone)
    return float(np.interp(length, lengths, [alone[one] for one in lengths]))


def _bound(alone: dict[int, dict[float, float]], rows: Sequence[dict[str, Any]]) -> str:
    """A sign for values at the ends of the runs alone."""
    if any(row["loss"] > max(alone[row["seed"]].values()) for row in rows):
        return "≤ "
    return "≥ " if any(row["loss"] < min(alone[row["seed"]].values()) for row in rows) else ""


def _number(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.4f}"


def interval(values: Sequence[float], digits: int) -> str:
    """The mean, and of several values half of the 95 % interval of Student's t."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    half = STUDENT[len(values)] * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("corpus", "table"):
        commands.add_parser(name).add_argument("path", type=Path)
    running = commands.add_parser("run")
    running.add_argument("path", type=Path)
    running.add_argument("--corpus", type=Path, required=True)
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
