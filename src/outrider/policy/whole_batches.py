"""Compares whole batches of one rank with shared steps, before that rank stays alone until the end of the run.

In a user's loop a rank cannot be tried alone, because the loops of the other ranks would fall behind. So it takes whole
batches in shared steps, in which the others have no samples. Called by `Alone`.
"""

from __future__ import annotations

import math
from statistics import median

# The verdict needs a difference of this part, divided by the root of the number of whole batches measured so far.
DOUBT = 0.4
# Sharing stays as soon as this many whole batches have taken at least as long as a shared step.
LEAST_SLOWER = 4
MOST = 16
# After so many batches this part of a shared step is quick enough.
CLEARLY_QUICKER = 0.95
# Shared steps until the next comparison; four times as many after each that did not end sharing.
FIRST_WAIT = 64
WAIT_GROWTH = 4


class WholeBatches:
    """Whole batches of one rank, measured a few at a time."""

    def __init__(self) -> None:
        self.is_comparing = False
        self.wait = FIRST_WAIT
        """Shared steps from the end of this comparison to the next one."""
        self._times_ms: list[float] = []

    def begin(self) -> None:
        self.is_comparing, self._times_ms = True, []

    def end(self) -> None:
        """Leave a comparison without a verdict."""
        self.is_comparing = False

    @property
    def typical_ms(self) -> float:
        return median(self._times_ms)

    def add(self, ms: float, *, shared_ms: float) -> bool | None:
        """Record a whole batch; returns whether the rank is quicker alone, None while that is not clear."""
        self._times_ms.append(ms)
        verdict = self._verdict(len(self._times_ms), self.typical_ms / shared_ms)
        if verdict is not None:
            self.is_comparing = False
        return verdict

    def put_off(self) -> int:
        """Shared steps until the next comparison, after one that did not end sharing."""
        wait, self.wait = self.wait, self.wait * WAIT_GROWTH
        return wait

    def _verdict(self, num: int, ratio: float) -> bool | None:
        if ratio <= 1 - DOUBT / math.sqrt(num):
            return True
        if num >= LEAST_SLOWER and ratio >= 1:
            return False
        return None if num < MOST else ratio <= CLEARLY_QUICKER
