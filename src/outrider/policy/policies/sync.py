"""Policy `sync`: equal batches, gradients averaged at every step, as in torch DDP; the reference.

Decides which positions a rank takes at each step; the driver averages. Fast ranks wait.
"""

from __future__ import annotations

from functools import lru_cache

from outrider.policy.batch_splitter import Split, even, without_singles
from outrider.policy.effects import AverageReport, Batch, Expect, Merge, Policy, Seat, SharedStep
from outrider.policy.policy_spec import SegmentContext


def sync(segment: SegmentContext) -> Policy:
    """One segment of an epoch in lockstep."""
    seat, span = segment.seat, segment.span
    wholes = tuple(span.batches(seat.batch_size * seat.world_size, least=min(2, seat.batch_size)))
    batches = tuple(_my_part(whole, seat) for whole in wholes)
    yield Expect(batches)
    mine = 0
    for whole, batch in zip(wholes, batches, strict=True):
        report: AverageReport = yield SharedStep(batch, at=whole.start)
        mine += batch.count
        if report.ends_segment:
            break
    yield Merge(samples=mine)


def _my_part(whole: Batch, seat: Seat) -> Batch:
    return _equal_split(whole.count, seat.world_size, seat.batch_size).batch(seat.rank, whole.start)


@lru_cache(maxsize=4)
def _equal_split(total: int, world_size: int, batch_size: int) -> Split:
    """The split for all ranks; cached, because the simulator asks once per simulated rank and step."""
    samples = even(total, world_size)
    # Only the last batch of a segment can leave a rank with one sample, unless the user asked for batches of one.
    parts = samples if batch_size == 1 else without_singles(samples)
    return Split(samples=parts, reason="equal")
