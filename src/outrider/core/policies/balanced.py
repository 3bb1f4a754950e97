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
            samples = sum(batch.count for batch in stretch) if seat.rank == splitter.lone else 0
            report = yield from _alone(splitter.lone, stretch, samples=samples)
            mine += samples
            is_common = True
            decisions = splitter.learn_alone(report)
        else:
            break
        for decision in decisions:
            yield Note(decision)
        if report.wants_stop:
            break
    # Who was handed everything has nothing of its own to bring together.
    if not is_common:
        yield Merge(samples=mine)


def _alone(lone: int, stretch: tuple[Batch, ...], *, samples: int) -> Generator[Effect, Report, Report]:
    """Whole batches on one rank; the others, who take none of their samples, wait to be handed what it learned."""
    if samples:
        yield Expect(stretch)
        for batch in stretch:
            yield Step(batch, at=batch.start)
    return (yield HandOver(source=lone, samples=samples, at=stretch[-1].start))
