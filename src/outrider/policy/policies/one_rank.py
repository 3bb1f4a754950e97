"""Replaces the policies of shared steps in a world of one rank: local steps, because there is nobody to share with.

Decides how often the rank checks for requests to stop or to save. A shared step would make the host wait, with no next
step queued; a GPU would then idle.
"""

from __future__ import annotations

from itertools import islice

from outrider.policy.effects import AverageReport, Confer, Expect, Merge, Policy, Step
from outrider.policy.policy_spec import SegmentContext

STRETCH_MS = 500.0
"""Time of the steps between two checks for requests: at a check, a GPU has nothing queued."""
MAX_STRETCH = 1024


def one_rank(segment: SegmentContext) -> Policy:
    """One segment of an epoch, one whole batch after another."""
    seat, span = segment.seat, segment.span
    batches = span.batches(seat.batch_size, least=min(2, seat.batch_size))
    length, mine = 1, 0
    while stretch := tuple(islice(batches, length)):
        yield Expect(stretch)
        for batch in stretch:
            yield Step(batch, at=batch.start)
        samples = sum(batch.count for batch in stretch)
        report: AverageReport = yield Confer(source=seat.rank, samples=samples)
        mine += samples
        if report.ends_segment:
            break
        length = _next_length(length, report)
    yield Merge(samples=mine)


def _next_length(length: int, report: AverageReport) -> int:
    """Steps until the next check, by the time of the steps so far; at most doubles, as early steps carry warm-up."""
    (facts,) = report.ranks
    step_ms = facts.compute_ms / max(1, facts.batches)
    wanted = round(STRETCH_MS / max(step_ms, STRETCH_MS / MAX_STRETCH))
    return max(1, min(wanted, 2 * length))
