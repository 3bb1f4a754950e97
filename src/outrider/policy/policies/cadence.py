"""Policy `cadence`: each rank takes its planned number of local steps, then all ranks average.

Decides which rank takes which positions of a window. All ranks hold the same facts and compute the same plan, so no
coordinator or shared cursor is needed. If an epoch is too short for a window and nobody reads the model at its end,
the window continues in the next epoch.
"""

from __future__ import annotations

from outrider.policy.effects import (
    NEW_WINDOW,
    Average,
    AverageReport,
    AwaitOthers,
    Border,
    Expect,
    LeaveOpen,
    Note,
    OpenWindow,
    Policy,
    Step,
)
from outrider.policy.policy_spec import SegmentContext


def cadence(segment: SegmentContext) -> Policy:
    """One segment of an epoch, window by window."""
    seat, planner, span = segment.seat, segment.planner, segment.span
    cursor, window = span.start, segment.window or NEW_WINDOW
    while cursor < span.stop:
        plan = planner.window(
            span.stop - cursor,
            run_left=segment.run_left(cursor),
            done=window.unaccounted,
            may_stay_open=segment.may_stay_open,
        )
        yield Note(plan.decision)
        lease = plan.lease(seat.rank, cursor)
        coming = tuple(lease.batches(seat.batch_size))
        yield Expect(coming)
        for batch in coming:
            ahead = (batch.start - lease.start) * plan.total // lease.count
            yield Step(batch, at=cursor + ahead)
        cursor += plan.total
        samples = window.samples + lease.count
        if plan.stays_open:
            border: Border = yield AwaitOthers()
            # A request to stop or a due checkpoint needs the average now.
            if not border.wants_end:
                yield LeaveOpen(OpenWindow(samples=samples, unaccounted=window.unaccounted + plan.total))
                return
        report: AverageReport = yield Average(samples=samples)
        window = NEW_WINDOW
        for decision in planner.learn(report):
            yield Note(decision)
        if report.ends_segment:
            break
