"""Policy `cadence`: each rank takes its planned number of local steps, then all meet and average.

Decides who takes which positions of a window: all ranks hold the same facts, so all compute the same plan and no
coordinator or shared cursor is needed.
"""

from __future__ import annotations

from outrider.core.effects import Average, Decision, Expect, Lease, Note, Policy, Report, Seat, Step
from outrider.core.planner import Plan, Planner


def cadence(seat: Seat, planner: Planner, span: Lease) -> Policy:
    """One segment of an epoch, window by window."""
    cursor = span.start
    while cursor < span.stop:
        plan = planner.window(span.stop - cursor)
        yield Note(as_decision(plan))
        lease = plan.lease(seat.rank, cursor)
        coming = tuple(lease.batches(seat.batch_size))
        yield Expect(coming)
        for batch in coming:
            ahead = (batch.start - lease.start) * plan.total // lease.count
            yield Step(batch, at=cursor + ahead)
        report: Report = yield Average(samples=lease.count)
        for decision in planner.learn(report):
            yield Note(decision)
        cursor += plan.total
        if report.wants_stop:
            break


def as_decision(plan: Plan) -> Decision:
    return Decision("plan", list(plan.batches), plan.reason, {"anchor": plan.anchor})
