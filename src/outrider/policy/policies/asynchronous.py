"""Policy `async`: like cadence, but no rank stops. The average runs in the background during the next window.

Decides when to take a snapshot and when to apply an average; positions are leased from the shared ledger, because a
rank may go beyond its plan while an average is late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any

from outrider.policy.effects import (
    AverageReport,
    Batch,
    Begin,
    Collect,
    Effect,
    Expect,
    GiveBack,
    Lease,
    Note,
    Policy,
    Poll,
    Step,
    Take,
)
from outrider.policy.policy_spec import SegmentContext
from outrider.policy.window_plan import WindowPlan
from outrider.policy.window_planner import STUB

WINDOWS_PER_LEASE = 4
BATCHES_PER_LEASE = 32
"""A lease costs a trip to the store, so short windows share one; the ledger gives less where the end is near."""


def asynchronous(segment: SegmentContext) -> Policy:
    """One segment of an epoch: leases, steps, and averages that are taken in when they are there."""
    seat, planner, span = segment.seat, segment.planner, segment.span
    state = _Window(segment)
    while True:
        plan = planner.window(span.count, run_left=segment.run_left(state.reached))
        yield Note(plan.decision)
        yield from _steps(state, goal=plan.batches[seat.rank], max_overshoot=segment.max_overshoot)
        # A snapshot must hold the last average, else that average's correction would be counted twice.
        if state.is_flying:
            report: AverageReport = yield Collect()
            yield from state.take_in(report)
            if report.is_dry:
                return
        if state.is_last_window(plan):
            yield from _steps_to_the_end(state, goal=plan.batches[seat.rank])
        yield Begin(samples=state.samples, is_dry=state.is_dry and not state.coming)
        state.begin()


def _steps(state: _Window, *, goal: int, max_overshoot: int) -> Policy:
    """Take `goal` batches, and up to `max_overshoot` more while the last average is still on its way."""
    batches = 0
    while batches < goal or (state.is_flying and batches < goal + max_overshoot):
        if not (yield from _step(state, wanted=WINDOWS_PER_LEASE * goal - batches)):
            return
        batches += 1
        if state.is_flying:
            report: AverageReport | None = yield Poll()
            if report is not None:
                yield from state.take_in(report)


def _steps_to_the_end(state: _Window, *, goal: int) -> Policy:
    """Take what is left of the segment, without another average on the way."""
    while (yield from _step(state, wanted=WINDOWS_PER_LEASE * goal)):
        pass


def _step(state: _Window, *, wanted: int) -> Generator[Effect, Any, bool]:
    """Take one batch, if any is left; a new lease has `wanted` batches or more."""
    if not state.coming:
        yield from _lease(state, wanted=max(BATCHES_PER_LEASE, wanted))
    if not state.coming:
        return False
    batch = state.coming.popleft()
    yield Step(batch, at=state.position_before(batch))
    state.samples += batch.count
    return True


def _lease(state: _Window, *, wanted: int) -> Policy:
    """Ask for more batches; a rank that gets none is dry and does not ask again."""
    if state.is_dry:
        return
    lease: Lease | None = yield Take(wanted * state.seat.batch_size, share=state.share)
    if lease is None:
        state.is_dry = True
        return
    state.coming.extend(lease.batches(state.seat.batch_size))
    yield Expect(tuple(state.coming))


class _Window:
    """What a rank knows of the window it is in."""

    def __init__(self, segment: SegmentContext) -> None:
        self.seat = segment.seat
        self.planner = segment.planner
        self.span = segment.span
        self.share = segment.planner.share(segment.seat.rank)
        self.coming: deque[Batch] = deque()
        """Leased and not yet done."""
        self.samples = 0
        self.is_flying = False
        self.is_dry = False
        """Nothing is left to lease."""
        self._samples_flying = 0
        self.reached = segment.span.start
        """The position that averages have accounted for, the same on all ranks."""
        self._position = segment.span.start
        self._last_total = 0

    def position_before(self, batch: Batch) -> int:
        """Where the whole world is, judged by the last report and this rank's own steps since; never backwards.

        Not at its end: this batch is still to be done.
        """
        since = (self._samples_flying + self.samples) / self.share
        self._position = max(self._position, min(self.span.stop - batch.count, self.reached + int(since)))
        return self._position

    def is_last_window(self, plan: WindowPlan) -> bool:
        """Whether the window under way goes on to the end, because what is left after it is too little for another one.

        Else two averages would follow each other at the end, while all ranks wait. The same on all ranks, which have
        taken in the same reports. Not where the user bounds the lead of fast ranks.
        """
        if self.planner.is_bounded:
            return False
        # The window before it may have had more batches than were planned.
        expected = max(plan.total, self._last_total)
        return self.span.stop - self.reached - expected < STUB * expected

    def begin(self) -> None:
        self.is_flying = True
        self._samples_flying, self.samples = self.samples, 0

    def take_in(self, report: AverageReport) -> Generator[Effect, Any, None]:
        self.is_flying = False
        self._samples_flying = 0
        self.reached += report.samples
        self._last_total = report.samples
        if report.ends_segment:
            yield from self._end_early()
        for decision in self.planner.learn(report):
            yield Note(decision)
        self.share = self.planner.share(self.seat.rank)

    def _end_early(self) -> Generator[Effect, Any, None]:
        """Take no more steps: a lease may be several windows long, and others would wait for its end."""
        self.is_dry = True
        if self.coming:
            start = self.coming[0].start
            yield GiveBack(Lease(start, self.coming[-1].stop - start))
            self.coming.clear()
