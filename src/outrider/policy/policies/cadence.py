"""Policy `cadence`: each rank takes its planned number of local steps, then all ranks average.

Decides which rank takes which positions of a window. All ranks hold the same facts and compute the same plan, so no
coordinator or shared cursor is needed.
"""

from __future__ import annotations

from outrider.policy.effects import Average, AverageReport, Expect, Note, Policy, Step
from outrider.policy.policy_spec import SegmentContext


def cadence(segment: SegmentContext) -> Policy:
    """One segment of an epoch, window by window."""
    seat, planner, span = segment.seat, segment.planner, segment.span
    cursor = span.start
    while cursor < span.stop:
        plan = planner.window(span.stop - cursor, run_left=segment.run_left(cursor))
        yield Note(plan.decision)
        lease = plan.lease(seat.rank, cursor)
        coming = tuple(lease.batches(seat.batch_size))
        yield Expect(coming)
        for batch in coming:
            ahead = (batch.start - lease.start) * plan.total // lease.count
            yield Step(batch, at=cursor + ahead)
        report: AverageReport = yield Average(samples=lease.count)
        for decision in planner.learn(report):
            yield Note(decision)
        cursor += plan.total
        if report.ends_segment:
            break
