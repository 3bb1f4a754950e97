"""The remaining positions of an epoch, as ranges in order.

Decides how an epoch continues after a segment that ended early: positions that ranks returned come first. The ledger
hands out positions. Called by the rank, which saves it in checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.policy.effects import Lease


class Remaining:
    """Ranges of the epoch's permutation; the first of them is trained on first."""

    def __init__(self, pieces: Sequence[Lease], *, end: int) -> None:
        """`end` is the number of positions in the whole epoch."""
        self.pieces = tuple(piece for piece in pieces if piece.count)
        self.end = end

    @classmethod
    def whole(cls, end: int) -> Remaining:
        return cls([Lease(0, end)], end=end)

    @property
    def count(self) -> int:
        return sum(piece.count for piece in self.pieces)

    @property
    def position(self) -> int:
        """How many positions of the epoch are done."""
        return self.end - self.count

    @property
    def is_in_order(self) -> bool:
        """Whether the rest of the epoch is the rest of its permutation."""
        return not self.pieces or self.pieces == (Lease(self.position, self.count),)

    def after(self, left: Sequence[Lease]) -> Remaining:
        """Keep only the ranges `left`.

        They are numbered as if the remaining pieces lay end to end, beginning at `position`. The result is in positions
        of the permutation.
        """
        return Remaining([part for piece in left for part in self._parts(piece)], end=self.end)

    def _parts(self, wanted: Lease) -> list[Lease]:
        parts, start = [], self.position
        for piece in self.pieces:
            first, last = max(wanted.start, start), min(wanted.stop, start + piece.count)
            if first < last:
                parts.append(Lease(piece.start + first - start, last - first))
            start += piece.count
        return parts

    def state(self) -> list[list[int]]:
        return [[piece.start, piece.count] for piece in self.pieces]

    @classmethod
    def restored(cls, state: Sequence[Sequence[int]], *, end: int) -> Remaining:
        return cls([Lease(start, count) for start, count in state], end=end)
