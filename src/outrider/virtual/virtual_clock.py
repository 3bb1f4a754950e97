"""The virtual-clock engine: drives one policy generator per rank in the order of simulated time.

Decides when each effect starts and ends. The `Work` object decides what a step or an average does: nothing in the
simulator, real training in the lab.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.policy.effects import (
    Average,
    AverageReport,
    AwaitOthers,
    Batch,
    Begin,
    Border,
    Collect,
    Confer,
    Effect,
    EndSegment,
    Expect,
    GiveBack,
    HandOver,
    Lease,
    LeaveOpen,
    Merge,
    Note,
    OpenWindow,
    Policy,
    Poll,
    RankFacts,
    Rest,
    SharedStep,
    Step,
    Take,
)
from outrider.policy.ledger import Ledger


class Work(Protocol):
    """Carries out effects; the clock decides how long they take."""

    def step(self, rank: int, batch: Batch, at: int) -> None: ...
    def gradient(self, rank: int, batch: Batch, at: int) -> None: ...
    def share_gradients(self, samples: Sequence[int]) -> None: ...
    def snapshot(self, rank: int) -> None: ...
    def settle(self, samples: Sequence[int]) -> float | None: ...
    def load(self, rank: int) -> None: ...
    def correct(self, rank: int) -> None: ...
    def merge(self, samples: Sequence[int]) -> None: ...
    def hand_over(self, source: int, at: int) -> None: ...
    def loss(self, rank: int) -> tuple[float, int]:
        """The sum of losses times samples since the last call, and the number of samples."""


class Idle:
    """Work that does nothing, for the simulator."""

    def loss(self, rank: int) -> tuple[float, int]:
        return 0.0, 0

    def step(self, rank: int, batch: Batch, at: int) -> None: ...
    def gradient(self, rank: int, batch: Batch, at: int) -> None: ...
    def share_gradients(self, samples: Sequence[int]) -> None: ...
    def snapshot(self, rank: int) -> None: ...
    def settle(self, samples: Sequence[int]) -> float | None:
        return None

    def load(self, rank: int) -> None: ...
    def correct(self, rank: int) -> None: ...
    def merge(self, samples: Sequence[int]) -> None: ...
    def hand_over(self, source: int, at: int) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The durations of effects, in ms of virtual time."""

    step_ms: Callable[[int, int], float]
    """Duration of a step, by rank and number of samples."""
    average_ms: float
    gradient_ms: float
    """Duration of the average of gradients in a shared step."""
    snapshot_ms: float = 0.0
    take_ms: float = 0.0
    shared_step_ms: Callable[[int, int], float] | None = None
    """Duration of a shared step; `step_ms` if None."""
    alone_step_ms: Callable[[int, int], float] | None = None
    """Duration of a step that a rank takes while all others rest; `step_ms` if None."""


@dataclass(slots=True)
class RankClock:
    """The clock of one rank and the sums of its time, in ms of virtual time."""

    now_ms: float = 0.0
    compute_ms: float = 0.0
    wait_ms: float = 0.0
    """Time spent waiting for other ranks."""
    exposed_ms: float = 0.0
    """Time spent in averages and leases, without waits."""
    samples: int = 0
    steps: int = 0
    last_step_ms: float = 0.0
    # Since the last average:
    window_samples: int = 0
    window_batches: int = 0
    window_ms: float = 0.0
    last_exposed_ms: float = 0.0
    last_waited_ms: float = 0.0
    last_average_ms: float = 0.0
    last_border_ms: float = 0.0
    steps_since_snapshot: int = 0


@dataclass(slots=True)
class _VirtualMeeting:
    """An average that some ranks have joined."""

    arrivals_ms: dict[int, float] = field(default_factory=dict)
    facts: dict[int, RankFacts] = field(default_factory=dict)
    done_ms: float | None = None
    report: AverageReport | None = None
    waiting: dict[int, float] = field(default_factory=dict)


class Flights:
    """The background averages by number; those in progress when a segment ends continue in the next segment."""

    def __init__(self, world_size: int) -> None:
        # A fast rank may start the next average before a slow rank has applied the last one.
        self.by_number: defaultdict[int, _VirtualMeeting] = defaultdict(_VirtualMeeting)
        self.begun = [0] * world_size
        self.taken_in = [0] * world_size

    def of(self, rank: int) -> _VirtualMeeting:
        """The average that this rank began last."""
        return self.by_number[self.begun[rank]]


class VirtualClock:
    """Runs the policies of one segment to their end."""

    _lone: int | None = None
    """The rank that works alone until it meets the others again."""

    def __init__(
        self,
        policies: Sequence[Policy],
        *,
        costs: Costs,
        ledger: Ledger,
        batch_size: int | Sequence[int],
        work: Work | None = None,
        clocks: list[RankClock] | None = None,
        windows_before: int = 0,
        on_effect: Callable[[int, float, Effect], None] | None = None,
        on_report: Callable[[float, AverageReport], None] | None = None,
        wants_stop: Callable[[], bool] | None = None,
        flights: Flights | None = None,
    ) -> None:
        self.policies = list(policies)
        self.size = len(self.policies)
        self.costs = costs
        self.ledger = ledger
        self.batch_sizes = [batch_size] * self.size if isinstance(batch_size, int) else list(batch_size)
        self.work: Work = work if work is not None else Idle()
        self.clocks = clocks if clocks is not None else [RankClock() for _ in self.policies]
        self.windows = windows_before
        self.on_effect = on_effect
        self.on_report = on_report
        self.wants_stop = wants_stop
        self.reached = 0
        """Samples that averages have accounted for."""
        self.left: tuple[Lease, ...] = ()
        """The positions that the policies left if they ended the segment early."""
        self._span = ledger.free[0] if ledger.free else Lease(0, 0)
        self._has_leased = False
        self.open_windows: dict[int, OpenWindow | None] = {}
        """The window of each rank that left it open."""
        self._flights = flights if flights is not None else Flights(self.size)
        self._awaiting: dict[int, float] = {}
        """For each rank that waits for others to take their last step, the time since when it waits."""
        self._meeting = _VirtualMeeting()
        self._held: dict[int, Lease] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._turns = [0] * self.size
        self._inbox: list[Any] = [None] * self.size
        self._handlers: dict[type, Callable[[int, Any], bool]] = {
            Step: self._step,
            SharedStep: self._shared_step,
            Average: self._average,
            Begin: self._begin,
            Poll: self._poll,
            Collect: self._collect,
            Take: self._take,
            GiveBack: self._give_back,
            Confer: self._confer,
            HandOver: self._hand_over,
            Merge: self._merge,
            EndSegment: self._end_segment,
            AwaitOthers: self._await_others,
            LeaveOpen: self._leave_open,
            Rest: self._rest,
            **dict.fromkeys((Note, Expect), self._nothing),
        }

    def run(self) -> None:
        self._heap = [(clock.now_ms, rank, 0) for rank, clock in enumerate(self.clocks)]
        heapq.heapify(self._heap)
        alive = self.size
        while self._heap:
            now_ms, rank, turn = heapq.heappop(self._heap)
            # A rank may have several wake-ups, for other ranks and for an average; an outdated one is ignored.
            if turn == self._turns[rank]:
                self._stop_waiting(rank, now_ms)
                alive -= self._resume(rank)
        assert alive == 0, f"{alive} ranks are waiting for an average that the others never reached"

    def _resume(self, rank: int) -> bool:
        """Send results and receive effects until one takes time; returns true when the policy has ended."""
        policy = self.policies[rank]
        while True:
            try:
                effect = policy.send(self._inbox[rank])
            except StopIteration:
                return True
            if self.on_effect is not None:
                self.on_effect(rank, self.clocks[rank].now_ms, effect)
            self._inbox[rank] = None
            if self._handlers[type(effect)](rank, effect):
                return False

    def _sleep(self, rank: int, duration_ms: float) -> None:
        clock = self.clocks[rank]
        clock.now_ms += duration_ms
        self._wake_at(clock.now_ms, rank)

    def _wake_at(self, now_ms: float, rank: int) -> None:
        heapq.heappush(self._heap, (now_ms, rank, self._turns[rank]))

    # Handlers return true if the rank must not be resumed immediately.

    def _nothing(self, rank: int, effect: Note | Expect) -> bool:
        return False

    def _rest(self, rank: int, effect: Rest) -> bool:
        self._lone = effect.source
        return False

    def _compute(self, rank: int, batch: Batch, step_ms: Callable[[int, int], float] | None) -> None:
        clock = self.clocks[rank]
        duration_ms = (step_ms or self.costs.step_ms)(rank, batch.count) if batch.count else 0.0
        clock.compute_ms += duration_ms
        clock.window_ms += duration_ms
        clock.samples += batch.count
        clock.window_samples += batch.count
        clock.window_batches += batch.count > 0
        clock.steps += 1
        clock.steps_since_snapshot += 1
        clock.now_ms += duration_ms
        clock.last_step_ms = clock.now_ms

    def _step(self, rank: int, effect: Step) -> bool:
        self.work.step(rank, effect.batch, effect.at)
        is_alone = self._lone == rank
        self._compute(rank, effect.batch, self.costs.alone_step_ms if is_alone else None)
        self._wake_at(self.clocks[rank].now_ms, rank)
        return True

    def _take(self, rank: int, effect: Take) -> bool:
        self._has_leased = True
        held = self._held.pop(rank, None)
        if held is not None:
            self.ledger.done(rank, held)
        lease = self.ledger.take(rank, effect.samples, share=effect.share, batch_size=self.batch_sizes[rank])
        if lease is not None:
            self._held[rank] = lease
        self._inbox[rank] = lease
        if self.costs.take_ms:
            # A lease from a remote store costs compute time like an average; longer windows reduce both.
            self.clocks[rank].exposed_ms += self.costs.take_ms
            self.clocks[rank].last_exposed_ms += self.costs.take_ms
            self._sleep(rank, self.costs.take_ms)
            return True
        return False

    def _give_back(self, rank: int, effect: GiveBack) -> bool:
        self.ledger.give_back(rank, self._held.pop(rank), effect.lease)
        return False

    def _end_segment(self, rank: int, effect: EndSegment) -> bool:
        if effect.left is not None:
            self.left = effect.left
        elif self._has_leased:
            self.left = self.ledger.free
        else:
            self.left = (Lease(self._span.start + self.reached, self._span.count - self.reached),)
        self._inbox[rank] = self.left
        return False

    def _facts(self, rank: int, *, is_dry: bool = False) -> RankFacts:
        clock = self.clocks[rank]
        loss_sum, loss_samples = self.work.loss(rank)
        facts = RankFacts(
            samples=clock.window_samples,
            batches=clock.window_batches,
            compute_ms=clock.window_ms,
            exposed_ms=clock.last_exposed_ms,
            waited_ms=clock.last_waited_ms,
            average_ms=clock.last_average_ms,
            border_ms=clock.last_border_ms,
            loss_sum=loss_sum,
            loss_samples=loss_samples,
            is_dry=is_dry,
            wants_stop=self.wants_stop is not None and self.wants_stop(),
        )
        clock.window_samples = clock.window_batches = 0
        clock.window_ms = clock.last_exposed_ms = 0.0
        clock.last_waited_ms = clock.last_average_ms = clock.last_border_ms = 0.0
        return facts

    def _shared_step(self, rank: int, effect: SharedStep) -> bool:
        self.work.gradient(rank, effect.batch, effect.at)
        self._compute(rank, effect.batch, self.costs.shared_step_ms)
        return self._meet(rank, self._facts(rank), self.costs.gradient_ms, self._finish_gradients)

    def _average(self, rank: int, effect: Average) -> bool:
        self.work.snapshot(rank)
        return self._meet(rank, self._facts(rank), self.costs.average_ms, self._finish_average)

    def _confer(self, rank: int, effect: Confer) -> bool:
        return self._meet(rank, self._facts(rank), self.costs.take_ms, lambda ranks: self._report(ranks, None))

    def _hand_over(self, rank: int, effect: HandOver) -> bool:
        def finish(ranks: tuple[RankFacts, ...]) -> AverageReport:
            self.work.hand_over(effect.source, effect.at)
            return self._report(ranks, None)

        return self._meet(rank, self._facts(rank), self.costs.average_ms, finish)

    def _merge(self, rank: int, effect: Merge) -> bool:
        facts = RankFacts(samples=effect.samples, batches=0, compute_ms=0.0, exposed_ms=0.0)
        return self._meet(rank, facts, self.costs.average_ms, self._finish_merge)

    def _meet(
        self, rank: int, facts: RankFacts, cost_ms: float, finish: Callable[[tuple[RankFacts, ...]], Any]
    ) -> bool:
        meeting = self._meeting
        meeting.arrivals_ms[rank] = self.clocks[rank].now_ms
        meeting.facts[rank] = facts
        if len(meeting.arrivals_ms) == self.size:
            self._meeting, self._lone = _VirtualMeeting(), None
            last_ms = max(meeting.arrivals_ms.values())
            result = finish(tuple(meeting.facts[peer] for peer in range(self.size)))
            for peer, arrival_ms in meeting.arrivals_ms.items():
                self._leave(peer, arrival_ms, last_ms, cost_ms)
                self._inbox[peer] = result
                self._wake_at(self.clocks[peer].now_ms, peer)
        return True

    def _leave(self, rank: int, arrival_ms: float, last_ms: float, cost_ms: float) -> None:
        clock = self.clocks[rank]
        clock.wait_ms += last_ms - arrival_ms
        clock.exposed_ms += cost_ms
        clock.last_exposed_ms += last_ms + cost_ms - arrival_ms
        clock.now_ms = last_ms + cost_ms

    def _report(self, ranks: tuple[RankFacts, ...], drift: float | None) -> AverageReport:
        report = AverageReport(window=self.windows, ranks=ranks, drift=drift)
        self.windows += 1
        self.reached += report.samples
        if self.on_report is not None:
            self.on_report(max(clock.now_ms for clock in self.clocks), report)
        return report

    def _finish_gradients(self, ranks: tuple[RankFacts, ...]) -> AverageReport:
        self.work.share_gradients([facts.samples for facts in ranks])
        return self._report(ranks, None)

    def _finish_average(self, ranks: tuple[RankFacts, ...]) -> AverageReport:
        drift = self.work.settle([facts.samples for facts in ranks])
        for rank in range(self.size):
            self.work.load(rank)
        return self._report(ranks, drift)

    def _finish_merge(self, ranks: tuple[RankFacts, ...]) -> None:
        self.work.merge([facts.samples for facts in ranks])

    # The end of a segment, where windows may stay open

    def _await_others(self, rank: int, effect: AwaitOthers) -> bool:
        now_ms, flight = self.clocks[rank].now_ms, self._flights.of(rank)
        self._awaiting[rank] = now_ms
        if len(self._awaiting) == self.size:
            self._cross_border(now_ms)
        elif flight.done_ms is not None:
            self._wake_at(max(flight.done_ms, now_ms), rank)
        return True

    def _cross_border(self, now_ms: float) -> None:
        """Let all ranks continue; called when every rank has taken its last step."""
        taken_in = self._flights.taken_in
        wants_end = self.wants_stop is not None and self.wants_stop()
        for rank in list(self._awaiting):
            self._stop_waiting(rank, now_ms)
            self._inbox[rank] = Border(is_behind=taken_in[rank] < max(taken_in), wants_end=wants_end)
            self._turns[rank] += 1
            self._wake_at(now_ms, rank)

    def _stop_waiting(self, rank: int, now_ms: float) -> None:
        if rank in self._awaiting:
            clock = self.clocks[rank]
            waited_ms = now_ms - self._awaiting.pop(rank)
            clock.wait_ms += waited_ms
            clock.last_border_ms += waited_ms
            clock.now_ms = now_ms

    def _leave_open(self, rank: int, effect: LeaveOpen) -> bool:
        self.open_windows[rank] = effect.window
        return False

    def _begin(self, rank: int, effect: Begin) -> bool:
        self.work.snapshot(rank)
        clock = self.clocks[rank]
        self._flights.begun[rank] += 1
        flight = self._flights.of(rank)
        flight.facts[rank] = self._facts(rank, is_dry=effect.is_dry)
        flight.arrivals_ms[rank] = clock.now_ms
        clock.steps_since_snapshot = 0
        clock.exposed_ms += self.costs.snapshot_ms
        clock.last_exposed_ms += self.costs.snapshot_ms
        if len(flight.arrivals_ms) == self.size:
            self._take_off(flight)
        if self.costs.snapshot_ms:
            self._sleep(rank, self.costs.snapshot_ms)
            return True
        return False

    def _take_off(self, flight: _VirtualMeeting) -> None:
        flight.done_ms = max(flight.arrivals_ms.values()) + self.costs.average_ms
        ranks = tuple(flight.facts[peer] for peer in range(self.size))
        drift = self.work.settle([facts.samples for facts in ranks])
        flight.report = self._report(ranks, drift)
        for peer, since_ms in flight.waiting.items():
            self._land(peer, since_ms, flight)
        for peer in self._awaiting:
            if self._flights.of(peer) is flight:
                self._wake_at(flight.done_ms, peer)

    def _poll(self, rank: int, effect: Poll) -> bool:
        flight = self._flights.of(rank)
        if flight.done_ms is not None and flight.done_ms <= self.clocks[rank].now_ms:
            self._take_in(rank, flight)
        return False

    def _collect(self, rank: int, effect: Collect) -> bool:
        flight = self._flights.of(rank)
        if flight.done_ms is None:
            flight.waiting[rank] = self.clocks[rank].now_ms
        else:
            self._land(rank, self.clocks[rank].now_ms, flight)
        return True

    def _land(self, rank: int, since_ms: float, flight: _VirtualMeeting) -> None:
        assert flight.done_ms is not None
        clock = self.clocks[rank]
        waited_ms = max(0.0, flight.done_ms - since_ms)
        clock.wait_ms += waited_ms
        clock.last_exposed_ms += waited_ms
        clock.last_waited_ms += waited_ms
        clock.now_ms = since_ms + waited_ms
        self._take_in(rank, flight)
        self._wake_at(clock.now_ms, rank)

    def _take_in(self, rank: int, flight: _VirtualMeeting) -> None:
        if self.clocks[rank].steps_since_snapshot:
            self.work.correct(rank)
        else:
            self.work.load(rank)
        self._inbox[rank] = flight.report
        assert flight.done_ms is not None
        self.clocks[rank].last_average_ms = flight.done_ms - flight.arrivals_ms.pop(rank)
        self._flights.taken_in[rank] += 1
        if not flight.arrivals_ms:
            del self._flights.by_number[self._flights.begun[rank]]
