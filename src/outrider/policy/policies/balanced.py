"""Policy `balanced`: gradients averaged at every step, the global batch split in proportion to speed.

Decides the split of each step; the gradient, weighted by samples, equals that of one device with the whole batch.
If sharing steps is slower than one rank alone, that rank takes whole batches and the others rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from itertools import islice

from outrider.policy.effects import (
    AverageReport,
    Batch,
    Confer,
    Effect,
    Expect,
    HandOver,
    Merge,
    Note,
    Policy,
    Rest,
    SharedStep,
    Step,
)
from outrider.policy.policy_spec import SegmentContext

STEPS_AHEAD = 2
"""Splits are decided this many steps early so that workers can prefetch; not while every step tries another split."""


def balanced(segment: SegmentContext) -> Policy:
    """One segment of an epoch; `seat.batch_size` is the batch of the whole world."""
    seat, splitter, span = segment.seat, segment.splitter, segment.span
    coming: deque[tuple[Batch, Batch]] = deque()
    wholes = span.batches(seat.batch_size)
    mine = 0
    is_common = False
    for decision in splitter.begin(seat.batch_size, left=segment.run_left(span.start)):
        yield Note(decision)
    while True:
        ahead = 1 if splitter.is_exploring else STEPS_AHEAD
        while splitter.lone is None and len(coming) < ahead and (whole := next(wholes, None)) is not None:
            split = splitter.next(whole.count, is_usual=whole.count <= seat.batch_size)
            batch = split.batch(seat.rank, whole.start)
            coming.append((whole, batch))
            yield Expect((batch,))
        if coming:
            whole, batch = coming.popleft()
            report: AverageReport = yield SharedStep(batch, at=whole.start)
            mine += batch.count
            is_common = False
            decisions = splitter.learn(report, left=segment.run_left(whole.stop))
        elif splitter.lone is not None and (stretch := tuple(islice(wholes, splitter.stretch))):
            lone, is_last = splitter.lone, stretch[-1].stop == span.stop
            samples = sum(batch.count for batch in stretch) if seat.rank == lone else 0
            report = yield from _alone(lone, stretch, samples=samples, is_last=is_last)
            mine += samples
            decisions = splitter.learn_alone(report, left=segment.run_left(stretch[-1].stop))
            is_common = is_last
            if splitter.lone != lone or (report.ends_segment and not is_last):
                yield HandOver(source=lone, samples=0, at=stretch[-1].start, may_wait=splitter.lone == lone)
                is_common = True
        else:
            break
        for decision in decisions:
            yield Note(decision)
        if report.ends_segment:
            break
    # After a hand-over there is nothing left to merge.
    if not is_common:
        yield Merge(samples=mine)


def _alone(
    lone: int, stretch: tuple[Batch, ...], *, samples: int, is_last: bool
) -> Generator[Effect, AverageReport, AverageReport]:
    """Train whole batches on rank `lone` while the others rest; a hand-over of its state follows the last stretch."""
    yield Rest(source=lone)
    if samples:
        yield Expect(stretch)
        for batch in stretch:
            yield Step(batch, at=batch.start)
    if is_last:
        return (yield HandOver(source=lone, samples=samples, at=stretch[-1].start, may_wait=True))
    return (yield Confer(source=lone, samples=samples))
