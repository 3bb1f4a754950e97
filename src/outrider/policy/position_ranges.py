"""Sets of positions as ranges: their union, and the rest of a span without them.

Pure arithmetic without a clock or I/O. Called to report the place in a pass to the user.
"""

from __future__ import annotations

from collections.abc import Iterable

from outrider.policy.effects import Lease


def union(ranges: Iterable[Lease]) -> tuple[Lease, ...]:
    """The same positions in as few ranges as possible, in order."""
    merged: list[Lease] = []
    for piece in sorted((piece for piece in ranges if piece.count), key=lambda piece: piece.start):
        if merged and piece.start <= merged[-1].stop:
            start = merged[-1].start
            merged[-1] = Lease(start, max(merged[-1].stop, piece.stop) - start)
        else:
            merged.append(piece)
    return tuple(merged)


def without(span: Lease, used: Iterable[Lease]) -> tuple[Lease, ...]:
    """The positions of a span that are in none of the `used` ranges, in order."""
    left, start = [], span.start
    for piece in union(used):
        stop = min(piece.start, span.stop)
        if stop > start:
            left.append(Lease(start, stop - start))
        start = max(start, piece.stop)
    if start < span.stop:
        left.append(Lease(start, span.stop - start))
    return tuple(left)
