"""What the policies of shared steps are in a world of one rank: its own steps, with nobody to share them with.

Decides how often the rank listens for a wish to stop or to save. A shared step would be waited for by the host, which
then has no next step queued: on a GPU that is time without work.
"""

from __future__ import annotations

from itertools import islice

from outrider.policy.effects import AverageReport, Confer, Expect, Merge, Policy, Step
from outrider.policy.policy_spec import SegmentContext

STRETCH_MS = 500.0
"""Time of the steps between which the rank listens: on a GPU nothing is queued in that moment."""
MAX_STRETCH = 1024


def one_rank(segment: SegmentContext) -> Policy:
    """One segment of an epoch, whole batches one after the other."""
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
    """By the time of the steps so far; it grows step by step, since the first ones carry the warm-up of a device."""
    (facts,) = report.ranks
    step_ms = facts.compute_ms / max(1, facts.batches)
    wanted = round(STRETCH_MS / max(step_ms, STRETCH_MS / MAX_STRETCH))
    return max(1, min(wanted, 2 * length))
