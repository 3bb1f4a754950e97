"""Checks that the ranks of a simulation together step on each position of a segment exactly once.

Keeps only the positions at which the number of steps changes, so adjoining batches cancel out. Called by the simulator.
"""

from __future__ import annotations

from outrider.policy.effects import Batch, Lease
from outrider.virtual.virtual_clock import Idle


class Coverage(Idle):
    """Counts how often the ranks step on each position."""

    def __init__(self) -> None:
        self._changes: dict[int, int] = {}
        """By how much the number of steps changes at a position; positions without a change are left out."""

    def step(self, rank: int, batch: Batch, at: int) -> None:
        self.add(batch.start, batch.stop)

    def gradient(self, rank: int, batch: Batch, at: int) -> None:
        self.add(batch.start, batch.stop)

    def add(self, start: int, stop: int) -> None:
        """Count one step on each position from `start` to `stop`."""
        self._change(start, 1)
        self._change(stop, -1)

    def _change(self, position: int, by: int) -> None:
        changed = self._changes.pop(position, 0) + by
        if changed:
            self._changes[position] = changed

    def fault(self, span: Lease) -> str | None:
        """The first position of the span without exactly one step, in words; None if there is none."""
        if self._changes == {span.start: 1, span.stop: -1}:
            return None
        # Without one step on each position of the span, what is left begins at the first position with another number.
        self.add(span.stop, span.start)
        position, extra = min(self._changes.items())
        if extra < 0:
            return f"no rank stepped on position {position}"
        return f"ranks stepped {extra + 1} times on position {position}"
