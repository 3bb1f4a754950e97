"""Policy `balanced`: gradients averaged at every step, the global batch split in proportion to speed.

Decides the split of each step; the gradient, weighted by samples, is exactly that of one device with the whole batch.
"""

from __future__ import annotations

from collections import deque

from outrider.core.effects import Batch, Expect, Lease, Merge, Note, Policy, Report, Seat, SharedStep
from outrider.core.split import Splitter

STEPS_AHEAD = 2
"""Splits are decided this many steps early, so that workers can fetch what comes."""


def balanced(seat: Seat, splitter: Splitter, span: Lease) -> Policy:
    """One segment of an epoch; `seat.batch_size` is the batch of the whole world."""
    coming: deque[tuple[Batch, Batch]] = deque()
    wholes = span.batches(seat.batch_size)
    mine = 0
    while True:
        while len(coming) < STEPS_AHEAD and (whole := next(wholes, None)) is not None:
            batch = splitter.next(whole.count).batch(seat.rank, whole.start)
            coming.append((whole, batch))
            yield Expect((batch,))
        if not coming:
            break
        whole, batch = coming.popleft()
        report: Report = yield SharedStep(batch, at=whole.start)
        mine += batch.count
        for decision in splitter.learn(report):
            yield Note(decision)
        if report.wants_stop:
            break
    yield Merge(samples=mine)
