"""Policy `async`: like cadence, but no rank stops. The average runs in the background during the next window.

Decides when to take a snapshot and when to apply an average; positions are leased from the shared ledger, because a
rank may go beyond its plan while an average is late. If nobody reads the model at the end of an epoch, the average in
flight continues into the next epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any

from outrider.policy.effects import (
    NEW_WINDOW,
    AverageReport,
    AwaitOthers,
    Batch,
    Begin,
    Border,
    Collect,
    Effect,
    Expect,
    GiveBack,
    Lease,
    LeaveOpen,
    Note,
    OpenWindow,
    Policy,
    Poll,
    Step,
    Take,
    num_batches,
)
from outrider.policy.policy_spec import SegmentContext
from outrider.policy.window_plan import WindowPlan
from outrider.policy.window_planner import STUB

WINDOWS_PER_LEASE = 4
BATCHES_PER_LEASE = 32
"""A lease costs a round trip to the store, so short windows share one; near the end the ledger gives less."""


def asynchronous(segment: SegmentContext) -> Policy:
    """One segment of an epoch: leases, steps, and averages that are applied as soon as they arrive."""
    seat, planner, span = segment.seat, segment.planner, segment.span
    state = _Window(segment)
    may_stay_open = segment.may_stay_open
    while True:
        plan = planner.window(span.count, run_left=segment.run_left(state.reached))
        yield Note(plan.decision)
        # A rank for which nothing is planned asks as well: only then does it learn that the segment has ended.
        yield from _steps(state, goal=max(1, plan.batches[seat.rank]), max_overshoot=segment.max_overshoot)
        if may_stay_open and state.has_ended:
            border = yield from _await_others(state)
            if not border.wants_end and not state.ends_early:
                yield LeaveOpen(state.left_open())
                return
            may_stay_open = False
        # A snapshot must hold the last average, else that average's correction would be counted twice.
        if state.is_flying:
            report: AverageReport = yield Collect()
            yield from state.take_in(report)
            if report.is_dry:
                return
        if not may_stay_open and state.is_last_window(plan):
            yield from _steps_to_the_end(state, goal=plan.batches[seat.rank])
        yield Begin(samples=state.samples, is_dry=state.has_ended and not may_stay_open)
        state.begin()


def _steps(state: _Window, *, goal: int, max_overshoot: int) -> Policy:
    """Take `goal` batches, and up to `max_overshoot` more while the last average is still on its way."""
    batches = num_batches(state.samples, state.seat.batch_size)
    while batches < goal or (state.is_flying and batches < goal + max_overshoot):
        if not (yield from _step(state, wanted=WINDOWS_PER_LEASE * goal - batches)):
            return
        batches += 1
        if state.is_flying:
            report: AverageReport | None = yield Poll()
            if report is not None:
                yield from state.take_in(report)


def _await_others(state: _Window) -> Generator[Effect, Any, Border]:
    """Take part in averages until all ranks have taken their last step; then all have applied the same averages."""
    while True:
        if not state.is_flying:
            # Ranks that still step may need this average; `is_dry` is for a segment that ends with its last average.
            yield Begin(samples=state.samples, is_dry=False)
            state.begin()
        border: Border | None = yield AwaitOthers()
        if border is None or border.is_behind:
            report: AverageReport = yield Collect()
            yield from state.take_in(report)
        if border is not None:
            return border


def _steps_to_the_end(state: _Window, *, goal: int) -> Policy:
    """Take all remaining batches of the segment without starting another average."""
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
    """State of the current window on one rank."""

    def __init__(self, segment: SegmentContext) -> None:
        self.seat = segment.seat
        self.planner = segment.planner
        self.span = segment.span
        self.share = segment.planner.share(segment.seat.rank)
        self.coming: deque[Batch] = deque()
        """Batches leased but not yet trained on."""
        before = segment.window or NEW_WINDOW
        self.samples = before.samples
        self.is_flying = before.flying is not None
        self.is_dry = False
        """Nothing is left to lease."""
        self.ends_early = False
        """Whether a report asked to end the segment."""
        self._samples_flying = before.flying or 0
        self.reached = segment.span.start - before.unaccounted
        """The position that averages have accounted for, the same on all ranks."""
        self._position = segment.span.start
        self._last_total = 0

    @property
    def has_ended(self) -> bool:
        """Whether no step is left for this rank."""
        return self.is_dry and not self.coming

    def left_open(self) -> OpenWindow:
        """The open window with which the next segment continues."""
        flying = self._samples_flying if self.is_flying else None
        return OpenWindow(samples=self.samples, flying=flying, unaccounted=self.span.stop - self.reached)

    def position_before(self, batch: Batch) -> int:
        """Estimate the position of all ranks from the last report and this rank's own steps since; never decreases.

        Stays below the end of the span, because this batch is still to come.
        """
        since = (self._samples_flying + self.samples) / self.share
        self._position = max(self._position, min(self.span.stop - batch.count, self.reached + int(since)))
        return self._position

    def is_last_window(self, plan: WindowPlan) -> bool:
        """Whether the current window runs to the end, because what remains after it is too little for another window.

        Otherwise two averages would follow each other at the end while all ranks wait. All ranks decide the same: they
        have received the same reports. Always false if the user bounds the lead of fast ranks.
        """
        if self.planner.is_bounded:
            return False
        # The previous window may have had more batches than planned.
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
        """Take no more steps: a lease may be several windows long, and other ranks would wait for its end."""
        self.is_dry = self.ends_early = True
        if self.coming:
            start = self.coming[0].start
            yield GiveBack(Lease(start, self.coming[-1].stop - start))
            self.coming.clear()
