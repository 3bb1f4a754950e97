"""Policy `sync`: equal batches, gradients averaged at every step. What torch DDP does, and the reference.

Decides which positions a rank takes at each step; the average itself is the driver's. Fast ranks wait.
"""

from __future__ import annotations

from outrider.core.effects import Expect, Lease, Merge, Policy, Report, Seat, SharedStep
from outrider.core.split import Split, even


def sync(seat: Seat, span: Lease) -> Policy:
    """One segment of an epoch in lockstep."""
    batches = tuple(
        Split(samples=even(whole.count, seat.world_size), reason="equal").batch(seat.rank, whole.start)
        for whole in span.batches(seat.batch_size * seat.world_size)
    )
    yield Expect(batches)
    mine = 0
    for whole, batch in zip(span.batches(seat.batch_size * seat.world_size), batches, strict=True):
        report: Report = yield SharedStep(batch, at=whole.start)
        mine += batch.count
        if report.wants_stop:
            break
    yield Merge(samples=mine)
