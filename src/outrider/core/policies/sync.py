"""Policy `sync`: equal batches, gradients averaged at every step. What torch DDP does, and the reference.

Decides which positions a rank takes at each step; the average itself is the driver's. Fast ranks wait.
"""

from __future__ import annotations

from outrider.core.effects import Batch, Expect, Lease, Merge, Policy, Report, Seat, SharedStep
from outrider.core.split import Split, even, without_singles


def sync(seat: Seat, span: Lease) -> Policy:
    """One segment of an epoch in lockstep."""
    batches = tuple(_my_part(whole, seat) for whole in span.batches(seat.batch_size * seat.world_size))
    yield Expect(batches)
    mine = 0
    for whole, batch in zip(span.batches(seat.batch_size * seat.world_size), batches, strict=True):
        report: Report = yield SharedStep(batch, at=whole.start)
        mine += batch.count
        if report.wants_stop:
            break
    yield Merge(samples=mine)


def _my_part(whole: Batch, seat: Seat) -> Batch:
    samples = even(whole.count, seat.world_size)
    # Only the last batch of a segment can leave a rank with one sample, unless one is what was asked for.
    parts = samples if seat.batch_size == 1 else without_singles(samples)
    return Split(samples=parts, reason="equal").batch(seat.rank, whole.start)
