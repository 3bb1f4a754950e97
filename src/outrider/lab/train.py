"""The lab: the same policies on real replicas under a virtual clock with given speeds.

Exact and repeatable on any machine, so questions of convergence and time to target are answered here, not by timing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.core.clockwork import Clockwork, Costs, RankClock
from outrider.core.effects import Decision, Effect, Lease, Note, Report, Seat
from outrider.core.ledger import Ledger
from outrider.core.planner import Planner
from outrider.core.policies import open_policy
from outrider.core.schedule import Entry, replay
from outrider.core.split import Splitter
from outrider.data.feed import Feed, make_feed
from outrider.data.order import in_order, shuffled
from outrider.errors import ConfigError
from outrider.lab.work import ReplicaWork
from outrider.replica.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """The virtual machine: relative speeds of the ranks and what an average costs, in batches of a device of speed 1.

    `fixed` is the part of a step that does not depend on its samples.
    """

    speeds: tuple[float, ...]
    average_cost: float = 0.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        if not self.speeds or min(self.speeds) <= 0:
            raise ConfigError(f"speeds must be > 0 for at least one rank, got {self.speeds}", hint="pass (1.0, 0.4)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LabPoint:
    """An evaluation; time is virtual, in batches of a device of speed 1."""

    samples: int
    time: float
    loss: float
    eval: float | None
    anchor: int
    drift: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LabRun:
    """What a run in the lab gives."""

    points: tuple[LabPoint, ...]
    averages: int
    samples_by_rank: tuple[int, ...]
    decisions: tuple[Decision, ...]
    work: ReplicaWork = field(repr=False)

    def time_to(self, target: float) -> float | None:
        """Virtual time until the evaluation first reaches the target; None if it never did."""
        return next((p.time for p in self.points if p.eval is not None and p.eval >= target), None)

    def state_dict(self, rank: int = 0) -> dict[str, torch.Tensor]:
        return self.work.replicas[rank].model.state_dict()


def train(
    recipe: Recipe, bench: Bench, *, points_per_epoch: int = 1, schedule: Sequence[Sequence[list[Entry]]] | None = None
) -> LabRun:
    """Train in virtual time; with a `schedule` (per segment, per rank) do again what another driver recorded."""
    lab = _Lab(recipe, bench)
    segments = [(epoch, lease) for epoch in range(recipe.epochs) for lease in lab.segments(points_per_epoch)]
    for number, (epoch, span) in enumerate(segments):
        lab.run_segment(epoch, span, entries=schedule[number] if schedule is not None else None)
    return LabRun(
        points=tuple(lab.points),
        averages=lab.windows,
        samples_by_rank=tuple(clock.samples for clock in lab.clocks),
        decisions=tuple(lab.decisions),
        work=lab.work,
    )


class _Lab:
    def __init__(self, recipe: Recipe, bench: Bench) -> None:
        self.recipe = recipe
        self.bench = bench
        self.size = len(bench.speeds)
        self.work = ReplicaWork(recipe, world_size=self.size)
        self.num_samples = self.work.feed.num_samples
        self.eval_feed: Feed | None = None
        if recipe.evaluate is not None:
            self.eval_feed = make_feed(recipe.eval_dataset, device=torch.device("cpu"), seed=recipe.seed)
            self.eval_feed.start_epoch(in_order(self.eval_feed.num_samples), 0)
        self.planners = [Planner(recipe.planner_config(self.size)) for _ in bench.speeds]
        self.splitters = [
            Splitter(world_size=self.size, shares=recipe.shares, speed_hints=recipe.speed_hints, may_rest=True)
            for _ in bench.speeds
        ]
        average = bench.average_cost if self.size > 1 else 0.0
        self.costs = Costs(step_ms=self._step_time, average_ms=average, gradient_ms=average)
        self.clocks = [RankClock() for _ in bench.speeds]
        self.windows = 0
        self.points: list[LabPoint] = []
        self.decisions: list[Decision] = []
        self._last_drift: float | None = None
        self._epoch = -1

    def segments(self, per_epoch: int) -> list[Lease]:
        edges = [round(self.num_samples * k / per_epoch) for k in range(per_epoch + 1)]
        return [Lease(start, stop - start) for start, stop in itertools.pairwise(edges)]

    def run_segment(self, epoch: int, span: Lease, *, entries: Sequence[list[Entry]] | None) -> None:
        self._start_epoch(epoch)
        policies = [
            open_policy(
                self.recipe.policy,
                Seat(rank, self.size, self.recipe.batch_size),
                span,
                planner=self.planners[rank],
                splitter=self.splitters[rank],
                max_overshoot=self.recipe.max_overshoot,
            )
            if entries is None
            else replay(entries[rank])
            for rank in range(self.size)
        ]
        engine = Clockwork(
            policies,
            costs=self.costs,
            ledger=Ledger(span.start, span.stop),
            batch_size=self.recipe.batch_size,
            work=self.work,
            clocks=self.clocks,
            windows_before=self.windows,
            on_effect=self._keep_decision,
            on_report=self._keep_drift,
        )
        self.work.step_ahead()
        engine.run()
        self.work.step_back()
        self.windows = engine.windows
        self._meet_clocks()
        self.points.append(self._point(epoch * self.num_samples + span.stop))

    def _start_epoch(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        self._epoch = epoch
        self.work.epoch_base = epoch * self.num_samples
        order = (
            shuffled(self.num_samples, seed=self.recipe.seed, epoch=epoch)
            if self.recipe.shuffle
            else in_order(self.num_samples)
        )
        self.work.feed.start_epoch(order, epoch)

    def _step_time(self, rank: int, samples: int) -> float:
        batches = samples / self.recipe.batch_size
        return (self.bench.fixed + (1 - self.bench.fixed) * batches) / self.bench.speeds[rank]

    def _meet_clocks(self) -> None:
        """An evaluation waits for the last rank."""
        latest = max(clock.now_ms for clock in self.clocks)
        for clock in self.clocks:
            clock.wait_ms += latest - clock.now_ms
            clock.now_ms = latest

    def _keep_decision(self, rank: int, now: float, effect: Effect) -> None:
        if rank == 0 and isinstance(effect, Note):
            self.decisions.append(effect.decision)

    def _keep_drift(self, now: float, report: Report) -> None:
        self._last_drift = report.drift

    def _point(self, samples: int) -> LabPoint:
        tallies = [replica.tally.drain() for replica in self.work.replicas]
        seen = sum(count for _, count in tallies)
        return LabPoint(
            samples=samples,
            time=self.clocks[0].now_ms,
            loss=sum(total for total, _ in tallies) / seen if seen else float("nan"),
            eval=self._evaluate(),
            anchor=self.planners[0].anchor,
            drift=self._last_drift,
        )

    def _evaluate(self) -> float | None:
        feed = self.eval_feed
        if feed is None:
            return None
        total = 0.0
        for batch in Lease(0, feed.num_samples).batches(max(256, self.recipe.batch_size)):
            total += self.work.replicas[0].evaluate(feed.fetch(batch)) * batch.count
        return total / feed.num_samples
