"""The lab: trains real replicas with the real policies, under a virtual clock with given speeds.

Results are exact and repeatable on any machine, for studies of convergence and time to target. Called by users,
benchmarks and tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from outrider.data.epoch_orders import EpochOrders
from outrider.data.epoch_pass import EpochPass
from outrider.data.feed import Feed, make_evaluation_feed
from outrider.data.order import in_order
from outrider.errors import ConfigError
from outrider.policy.batch_splitter import Splitter
from outrider.policy.effects import AverageReport, Decision, Effect, Lease, Note, Seat
from outrider.policy.ledger import Ledger
from outrider.policy.policies import open_policy
from outrider.policy.policy_chooser import PolicyChooser
from outrider.policy.remaining import Remaining
from outrider.policy.schedule import Entry, replay
from outrider.policy.window_planner import WindowPlanner
from outrider.replica.recipe import Recipe
from outrider.virtual.lab_replicas import ReplicaWork
from outrider.virtual.virtual_clock import Costs, Flights, RankClock, VirtualClock


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """The virtual machine: relative speeds of the ranks and the cost of an average, in batches of a device of speed 1.

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
    """An evaluation; time is virtual, and its unit is one batch on a device of speed 1."""

    samples: int
    time: float
    loss: float
    eval: float | None
    anchor: int
    drift: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LabRun:
    """The result of a run in the lab."""

    points: tuple[LabPoint, ...]
    averages: int
    samples_by_rank: tuple[int, ...]
    decisions: tuple[Decision, ...]
    work: ReplicaWork = field(repr=False)

    def time_to(self, target: float) -> float | None:
        """Virtual time until the evaluation first reaches the target; None if it never does."""
        return next((p.time for p in self.points if p.eval is not None and p.eval >= target), None)

    def state_dict(self, rank: int = 0) -> dict[str, torch.Tensor]:
        return self.work.replicas[rank].model.state_dict()


def train(
    recipe: Recipe, bench: Bench, *, points_per_epoch: int = 1, schedule: Sequence[Sequence[list[Entry]]] | None = None
) -> LabRun:
    """Train in virtual time; with a `schedule` (per segment, per rank), replay the recording of another driver."""
    lab = Lab(recipe, bench)
    parts = lab.segments(points_per_epoch)
    recorded = None if schedule is None else iter(schedule)
    for epoch in range(lab.extent.num_epochs):
        current = lab.begin_epoch(epoch)
        for part in lab.extent.cut(epoch, parts):
            lab.run_to(part.stop, current, recorded=recorded)
    return LabRun(
        points=tuple(lab.points),
        averages=lab.windows,
        samples_by_rank=tuple(clock.samples for clock in lab.clocks),
        decisions=tuple(lab.decisions),
        work=lab.work,
    )


class Lab:
    """The ranks of a run in virtual time, segment by segment."""

    def __init__(self, recipe: Recipe, bench: Bench, *, work: ReplicaWork | None = None) -> None:
        self.recipe = recipe
        self.bench = bench
        self.size = len(bench.speeds)
        recipe.check_ranks(self.size)
        self.work = work if work is not None else ReplicaWork(recipe, world_size=self.size)
        self.orders = EpochOrders(self.work.feed, order=recipe.order, shuffle=recipe.shuffle, seed=recipe.seed)
        self.extent = recipe.extent(self.orders.num_positions, self.size)
        self.orders.refuse_other_lengths(self.extent.num_epochs)
        self.num_samples = self.extent.epoch_samples
        self.eval_feed: Feed | None = None
        if recipe.evaluate is not None:
            self.eval_feed = make_evaluation_feed(recipe.eval_dataset, device="cpu", seed=recipe.seed)
            self.eval_feed.start_epoch(in_order(self.eval_feed.num_samples), 0)
        self.planners = [
            WindowPlanner(recipe.planner_config(self.size, batch_size=recipe.mean_batch_size)) for _ in bench.speeds
        ]
        self.splitters = [
            Splitter(world_size=self.size, shares=recipe.shares, speed_hints=recipe.speed_hints, may_rest=True)
            for _ in bench.speeds
        ]
        self.choosers = [PolicyChooser(world_size=self.size) for _ in bench.speeds]
        average = bench.average_cost if self.size > 1 else 0.0
        self.costs = Costs(step_ms=self._step_time, average_ms=average, gradient_ms=average)
        self.clocks = [RankClock() for _ in bench.speeds]
        self.flights = Flights(self.size)
        self.is_open = False
        """Whether the last segment left its windows open, as recorded segments may."""
        self.windows = 0
        self.points: list[LabPoint] = []
        self.decisions: list[Decision] = []
        self._last_drift: float | None = None
        self.on_report: Callable[[AverageReport], None] = lambda report: None

    def segments(self, per_epoch: int) -> list[Lease]:
        edges = [round(self.num_samples * k / per_epoch) for k in range(per_epoch + 1)]
        return [Lease(start, stop - start) for start, stop in itertools.pairwise(edges)]

    def begin_epoch(self, epoch: int) -> EpochPass:
        self.work.epoch_base = epoch * self.num_samples
        order = self.orders.begin(epoch)
        self.work.feed = self.orders.feed
        return EpochPass(
            epoch=epoch,
            batch_size=self.recipe.mean_batch_size,
            feed=self.work.feed,
            order=order,
            remaining=Remaining.whole(self.num_samples),
            stop=self.extent.stop(epoch),
            seen=self.extent.seen(epoch, 0),
        )

    def run_to(self, stop: int, current: EpochPass, *, recorded: Iterator[Sequence[list[Entry]]] | None) -> None:
        """Train up to a position of the epoch, in as many segments as the policy needs, and evaluate."""
        while current.remaining.position < stop:
            span = current.span_to(stop)
            left = self.run_segment(current, span, entries=None if recorded is None else next(recorded))
            current.end_segment(left)
        self._meet_clocks()
        self.points.append(self._point(current.seen + stop))

    def run_segment(
        self, current: EpochPass, span: Lease, *, entries: Sequence[Sequence[Entry]] | None
    ) -> tuple[Lease, ...]:
        """Run one segment; returns the positions that the policies left."""
        policies = [
            open_policy(
                self.recipe.policy,
                Seat(rank, self.size, self._size_of(rank)),
                span,
                planner=self.planners[rank],
                splitter=self.splitters[rank],
                max_overshoot=self.recipe.max_overshoot,
                samples_after=self.extent.total - current.seen - span.stop,
                chooser=self.choosers[rank],
            )
            if entries is None
            else replay(entries[rank])
            for rank in range(self.size)
        ]
        engine = VirtualClock(
            policies,
            costs=self.costs,
            ledger=Ledger(span.start, span.stop),
            batch_size=[self._size_of(rank) for rank in range(self.size)],
            work=self.work,
            clocks=self.clocks,
            windows_before=self.windows,
            on_effect=self._keep_decision,
            on_report=self._keep_drift,
            flights=self.flights,
        )
        if not self.is_open:
            self.work.lay_out()
            self.work.move_to_lookahead()
        engine.run()
        self.work.check_finite()
        self.is_open = bool(engine.open_windows)
        if not self.is_open:
            self.work.move_to_average()
        self.windows = engine.windows
        return engine.left

    def _size_of(self, rank: int) -> int:
        return self.recipe.own_batch_size(rank, batch_size=self.recipe.mean_batch_size)

    def _step_time(self, rank: int, samples: int) -> float:
        batches = samples / self.recipe.mean_batch_size
        return (self.bench.fixed + (1 - self.bench.fixed) * batches) / self.bench.speeds[rank]

    def _meet_clocks(self) -> None:
        """Set all clocks to the latest one, because an evaluation waits for the last rank."""
        latest = max(clock.now_ms for clock in self.clocks)
        for clock in self.clocks:
            clock.wait_ms += latest - clock.now_ms
            clock.now_ms = latest

    def _keep_decision(self, rank: int, now: float, effect: Effect) -> None:
        if rank == 0 and isinstance(effect, Note):
            self.decisions.append(effect.decision)

    def _keep_drift(self, now: float, report: AverageReport) -> None:
        self._last_drift = report.drift
        self.on_report(report)

    def _point(self, samples: int) -> LabPoint:
        tallies = [replica.loss_sums.drain() for replica in self.work.replicas]
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
        for batch in Lease(0, feed.num_samples).batches(max(256, self.recipe.mean_batch_size)):
            total += self.work.replicas[0].evaluate(feed.fetch(batch)) * batch.count
        return total / feed.num_samples
