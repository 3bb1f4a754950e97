"""Policy `async`: like cadence, but nobody stops. The average runs behind the next window.

Decides when to snapshot and when to take an average in; positions are leased from the shared ledger, since a rank may
go beyond its plan while an average is late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any

from outrider.core.effects import (
    Batch,
    Begin,
    Collect,
    Effect,
    Expect,
    Lease,
    Note,
    Policy,
    Poll,
    Report,
    Seat,
    Step,
    Take,
)
from outrider.core.planner import Planner
from outrider.core.policies.cadence import as_decision

WINDOWS_PER_LEASE = 4
"""A lease costs a trip to the store; the ledger gives less where the end is near."""


def asynchronous(seat: Seat, planner: Planner, span: Lease, *, max_overshoot: int) -> Policy:
    """One segment of an epoch: leases, steps, and averages that are taken in when they are there."""
    state = _Window(seat, planner, span)
    while True:
        plan = planner.window(span.count)
        yield Note(as_decision(plan))
        yield from _steps(state, goal=plan.batches[seat.rank], max_overshoot=max_overshoot)
        # A snapshot must hold the last average, else that average's correction would be counted twice.
        if state.is_flying:
            report: Report = yield Collect()
            yield from state.take_in(report)
            if report.is_dry:
                return
        yield Begin(samples=state.samples, is_dry=state.is_dry and not state.coming)
        state.begin()


def _steps(state: _Window, *, goal: int, max_overshoot: int) -> Policy:
    """Take `goal` batches, and up to `max_overshoot` more while the last average is still on its way."""
    batches = 0
    while batches < goal or (state.is_flying and batches < goal + max_overshoot):
        if not state.coming:
            yield from _lease(state, wanted=WINDOWS_PER_LEASE * goal - batches)
        if not state.coming:
            return
        batch = state.coming.popleft()
        yield Step(batch, at=state.position)
        state.samples += batch.count
        batches += 1
        if state.is_flying:
            report: Report | None = yield Poll()
            if report is not None:
                yield from state.take_in(report)


def _lease(state: _Window, *, wanted: int) -> Policy:
    """Ask for more batches; a rank that gets none is dry and does not ask again."""
    if state.is_dry:
        return
    lease: Lease | None = yield Take(max(1, wanted) * state.seat.batch_size, share=state.share)
    if lease is None:
        state.is_dry = True
        return
    state.coming.extend(lease.batches(state.seat.batch_size))
    yield Expect(tuple(state.coming))


class _Window:
    """What a rank knows of the window it is in."""

    def __init__(self, seat: Seat, planner: Planner, span: Lease) -> None:
        self.seat = seat
        self.planner = planner
        self.span = span
        self.share = planner.share(seat.rank)
        self.coming: deque[Batch] = deque()
        """Leased and not yet done."""
        self.samples = 0
        self.is_flying = False
        self.is_dry = False
        """Nothing is left to lease."""
        self._samples_flying = 0
        self._reached = span.start
        self._position = span.start

    @property
    def position(self) -> int:
        """Where the whole world is, judged by the last report and this rank's own steps since; never backwards."""
        since = (self._samples_flying + self.samples) / self.share
        self._position = max(self._position, min(self.span.stop, self._reached + int(since)))
        return self._position

    def begin(self) -> None:
        self.is_flying = True
        self._samples_flying, self.samples = self.samples, 0

    def take_in(self, report: Report) -> Generator[Effect, Any, None]:
        self.is_flying = False
        self._samples_flying = 0
        self._reached += report.samples
        self.is_dry = self.is_dry or report.wants_stop
        for decision in self.planner.learn(report):
            yield Note(decision)
        self.share = self.planner.share(self.seat.rank)
