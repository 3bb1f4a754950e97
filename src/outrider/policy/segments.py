"""Cuts the rest of an epoch into segments; checkpoints are taken between them.

Decides where a segment ends: after whole batches, so that a checkpoint does not change the batches of a run. Does not
decide how often checkpoints are due. Called by the rank before each segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from outrider.policy.effects import Lease

# Parts such as 0.1 have no exact float: ten of them must not leave a remainder of an epoch.
WHOLE = 1 - 1e-9


def segments(span: Lease, *, num_samples: int, every: float | None, unit: int) -> Iterator[Lease]:
    """The segments of `span`, which end after each part `every` of an epoch of `num_samples`; None: at its end.

    `unit` is the number of samples that ranks take together in a step. No segment has a single sample, unless the unit
    or the whole span has one.
    """
    start = span.start
    for edge in _edges(num_samples, every, unit):
        if start < edge and edge + min(2, unit) <= span.stop:
            yield Lease(start, edge - start)
            start = edge
    if start < span.stop:
        yield Lease(start, span.stop - start)


def _edges(num_samples: int, every: float | None, unit: int) -> Iterator[int]:
    if every is None or every >= 1:
        return
    for number in count(1):
        if number * every >= WHOLE:
            return
        yield round(number * every * num_samples / unit) * unit
