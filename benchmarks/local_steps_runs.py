"""The runs of local_steps_gpt.py: one device, local steps of two in virtual time, and late gradients.

`cadence` and `async` are the policies' own code under the lab's virtual clock; averages have the arithmetic of
`outrider.average`. Decides nothing about which runs there are.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from flat_gpt import FlatGpt, Shape, batches_of, initial_values, part_of_rate
from torch import Tensor

from outrider.average.outer import Outer
from outrider.policy.batch_splitter import Splitter
from outrider.policy.effects import Batch, Lease, Seat
from outrider.policy.ledger import Ledger
from outrider.policy.policies import open_policy
from outrider.policy.policy_chooser import PolicyChooser
from outrider.policy.window_planner import PlannerConfig, WindowPlanner
from outrider.virtual.virtual_clock import Costs, Idle, VirtualClock, Work

SPEEDS = (1.0, 0.4)
LIMIT = sum(SPEEDS)
MAX_OVERSHOOT = 4
"""Of `async`, as by default."""
RECENT = 0.9
"""Decay, per average, of the samples from which the ranks' shares are computed; as in `outrider.average.exchange`."""
NUM_EVAL_BATCHES = 64
PACE = 64
"""The host waits for the device every so many steps."""


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
    target: float | None = None
    """Windows tuned to this part of the time for averages, in place of an anchor; the run takes T."""
    cost: float = 0.0
    """Of an average, in steps of the fast device; with a target only."""
    seed: int = 0


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
        self.num_batches = round(cell.length * setting.ticks) if cell.target is None else batches_within(cell, setting)
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
    cell = trainer.cell
    outer = Outer() if cell.momentum is None else Outer(kind="nesterov", momentum=cell.momentum)  # type: ignore[arg-type]
    work = Averages(trainer, outer, averages_state=cell.averages_state)
    clock = run_clock(cell, trainer.num_batches, work)
    work.move_to_average()
    return {"time": clock_end(clock), "averages": work.count}


def run_clock(cell: Cell, count: int, work: Work) -> VirtualClock:
    """The policy on so many batches."""
    size = len(SPEEDS)
    is_blocking = cell.kind == "cadence"
    tuned = {"anchor": cell.anchor} if cell.target is None else {"overhead_target": cell.target}
    config = PlannerConfig(world_size=size, batch_size=1, is_blocking=is_blocking, **tuned)  # type: ignore[arg-type]
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
        average_ms=cell.cost if is_blocking else cell.window / 2,
        gradient_ms=0.0,
    )
    clock = VirtualClock(policies, costs=costs, ledger=Ledger(0, count), batch_size=1, work=work)
    clock.run()
    return clock


def clock_end(clock: VirtualClock) -> float:
    return max(own.now_ms for own in clock.clocks)


def batches_within(cell: Cell, setting: Setting) -> int:
    """How many batches both devices take in T, with averages; by halving."""
    least, most = 1, round(LIMIT * setting.ticks)
    while least < most:
        middle = (least + most + 1) // 2
        if clock_end(run_clock(cell, middle, Idle())) <= setting.ticks:
            least = middle
        else:
            most = middle - 1
    return least


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
