"""Policy `balanced`: gradients averaged at every step, the global batch split in proportion to speed.

Decides the split of each step; the gradient, weighted by samples, is exactly that of one device with the whole batch.
Where sharing steps is slower than one rank alone, that rank takes whole batches and the others rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from itertools import islice

from outrider.core.effects import (
    Batch,
    Confer,
    Effect,
    Expect,
    HandOver,
    Lease,
    Merge,
    Note,
    Policy,
    Report,
    Seat,
    SharedStep,
    Step,
)
from outrider.core.split import Splitter

STEPS_AHEAD = 2
"""Splits are decided this many steps early, so that workers can fetch what comes."""


def balanced(seat: Seat, splitter: Splitter, span: Lease) -> Policy:
    """One segment of an epoch; `seat.batch_size` is the batch of the whole world."""
    coming: deque[tuple[Batch, Batch]] = deque()
    wholes = span.batches(seat.batch_size)
    mine = 0
    is_common = False
    while True:
        while splitter.lone is None and len(coming) < STEPS_AHEAD and (whole := next(wholes, None)) is not None:
            batch = splitter.next(whole.count).batch(seat.rank, whole.start)
            coming.append((whole, batch))
            yield Expect((batch,))
        if coming:
            whole, batch = coming.popleft()
            report: Report = yield SharedStep(batch, at=whole.start)
            mine += batch.count
            is_common = False
            decisions = splitter.learn(report)
        elif splitter.lone is not None and (stretch := tuple(islice(wholes, splitter.stretch))):
            lone, is_last = splitter.lone, stretch[-1].stop == span.stop
            samples = sum(batch.count for batch in stretch) if seat.rank == lone else 0
            report = yield from _alone(lone, stretch, samples=samples, is_last=is_last)
            mine += samples
            decisions = splitter.learn_alone(report)
            is_common = is_last
            if not is_common and (splitter.lone is None or report.wants_stop):
                yield HandOver(source=lone, samples=0, at=stretch[-1].start)
                is_common = True
        else:
            break
        for decision in decisions:
            yield Note(decision)
        if report.wants_stop:
            break
    # Who was handed everything has nothing of its own to bring together.
    if not is_common:
        yield Merge(samples=mine)


def _alone(lone: int, stretch: tuple[Batch, ...], *, samples: int, is_last: bool) -> Generator[Effect, Report, Report]:
    """Whole batches on one rank; the others, who take none of their samples, are handed what it learned at the last."""
    if samples:
        yield Expect(stretch)
        for batch in stretch:
            yield Step(batch, at=batch.start)
    if is_last:
        return (yield HandOver(source=lone, samples=samples, at=stretch[-1].start))
    return (yield Confer(source=lone, samples=samples))
