"""`independent`: all ranks step without averaging. The ceiling of a machine for measurements, not a training mode.

Decides only the size of a lease.
"""

from __future__ import annotations

from outrider.policy.effects import Expect, Lease, Policy, Step, Take
from outrider.policy.policy_spec import SegmentContext

BATCHES_PER_LEASE = 16


def independent(segment: SegmentContext) -> Policy:
    """One segment of an epoch, each rank for itself."""
    seat = segment.seat
    share = 1 / seat.world_size
    while True:
        lease: Lease | None = yield Take(BATCHES_PER_LEASE * seat.batch_size, share=share)
        if lease is None:
            return
        batches = tuple(lease.batches(seat.batch_size))
        yield Expect(batches)
        for batch in batches:
            yield Step(batch, at=batch.start)
