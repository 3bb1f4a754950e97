"""`independent`: all ranks step, nobody averages. The ceiling of a machine to measure against, not a way to train.

Decides nothing but the size of a lease.
"""

from __future__ import annotations

from outrider.core.effects import Expect, Lease, Policy, Seat, Step, Take

BATCHES_PER_LEASE = 16


def independent(seat: Seat, span: Lease) -> Policy:
    """One segment of an epoch, each rank for itself."""
    share = 1 / seat.world_size
    while True:
        lease: Lease | None = yield Take(BATCHES_PER_LEASE * seat.batch_size, share=share)
        if lease is None:
            return
        batches = tuple(lease.batches(seat.batch_size))
        yield Expect(batches)
        for batch in batches:
            yield Step(batch, at=batch.start)
