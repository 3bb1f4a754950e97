"""Tunes the anchor: how many batches the slowest rank does between two averages.

Does not measure costs and does not deal out batches; it weighs what an average costs against the window's time.
Called by the planner after every average; the guard has it shrunk when replicas drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from outrider.core.effects import Decision

GROWTH_MAX = 2


class Anchor:
    """The number of batches of the slowest rank in a window, tuned within [minimum, maximum].

    Only the guard goes below the minimum; once it is content, the anchor climbs back.
    """

    def __init__(self, start: int, *, minimum: int, maximum: int, overhead_target: float) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._overhead_target = overhead_target
        self._value = max(minimum, min(maximum, start))

    @property
    def value(self) -> int:
        return self._value

    def after(
        self, *, exposed_ms: float, window_ms: float, may_grow: bool, lost_ms: float | None = None
    ) -> Decision | None:
        """Follow the measured cost of an average; overhead is its part of the whole time, exposed / (exposed + window).

        `lost_ms` is what ranks lost per window for any reason: where waiting for each other already costs more than
        half the target, more frequent averages would only add to it, so the anchor is not shrunk.
        """
        if window_ms <= 0:
            return None
        if self._value < self._minimum:
            return self._move(self._value + 1, "the guard is content again", None) if may_grow else None
        overhead = _part(exposed_ms, window_ms)
        if overhead > self._overhead_target:
            return self._grow(exposed_ms / window_ms, overhead) if may_grow else None
        lost = overhead if lost_ms is None else max(overhead, _part(lost_ms, window_ms))
        if lost < self._overhead_target / 2:
            reason = f"averaging takes {overhead:.1%}, below half the target of {self._overhead_target:.0%}"
            return self._move(max(self._minimum, self._value - 1), reason, overhead)
        return None

    def shrink(self, factor: float, reason: str) -> Decision | None:
        """Shrink by a factor, at least by one batch, down to one; a fixed anchor stays."""
        if self._minimum == self._maximum:
            return None
        return self._move(max(1, min(self._value - 1, math.floor(self._value * factor))), reason, None)

    def state(self) -> dict[str, Any]:
        return {"value": self._value}

    @classmethod
    def restored(cls, state: dict[str, Any], *, minimum: int, maximum: int, overhead_target: float) -> Anchor:
        """What was learned, under the options of the present run."""
        return cls(state["value"], minimum=minimum, maximum=maximum, overhead_target=overhead_target)

    def _grow(self, exposed_per_window: float, overhead: float) -> Decision | None:
        target = self._overhead_target
        # The cost of an average is fixed, so the window that brings it to the target follows by proportion.
        wanted = math.ceil(self._value * exposed_per_window * (1 - target) / target)
        reason = f"averaging takes {overhead:.1%}, above the target of {target:.0%}"
        return self._move(min(GROWTH_MAX * self._value, max(self._value + 1, wanted)), reason, overhead)

    def _move(self, value: int, reason: str, overhead: float | None) -> Decision | None:
        before, self._value = self._value, min(self._maximum, value)
        if self._value == before:
            return None
        details = {"from": before, "to": self._value, "overhead": overhead}
        return Decision("anchor", self._value, f"{before} -> {self._value}: {reason}", details)


def batches_at(anchor: int, paces: Sequence[float], *, max_batch_diff: int | None = None) -> tuple[int, ...]:
    """Batches of each rank in a window: the slowest does `anchor`, the others as many as fit in its time."""
    slowest = max(paces)
    # A rank without batches would never be measured again.
    batches = tuple(max(1, round(anchor * slowest / pace)) for pace in paces)
    if max_batch_diff is None:
        return batches
    return tuple(min(count, anchor + max_batch_diff) for count in batches)


def waste(batches: Sequence[int], paces: Sequence[float]) -> float:
    """The idle part of all ranks' time when they wait for the last at the end of the window."""
    busy = [count * pace for count, pace in zip(batches, paces, strict=True)]
    longest = max(busy)
    return 1 - sum(busy) / (len(busy) * longest) if longest else 0.0


def least_waste(
    anchor: int,
    paces: Sequence[float],
    *,
    minimum: int,
    maximum: int,
    reach: float = 0.10,
    max_batch_diff: int | None = None,
) -> int:
    """The anchor within `reach` (a part of it, at least one batch) whose rounding wastes least; ties to the nearest."""
    steps = max(1, round(reach * anchor))
    near = range(max(minimum, anchor - steps), min(maximum, anchor + steps) + 1)

    def cost(candidate: int) -> tuple[float, int, int]:
        idle = waste(batches_at(candidate, paces, max_batch_diff=max_batch_diff), paces)
        # Rounded, so that the last bits of a float do not beat nearness; of two as near the larger averages less often.
        return round(idle, 9), abs(candidate - anchor), -candidate

    return min(near, key=cost, default=anchor)


def _part(cost_ms: float, window_ms: float) -> float:
    return cost_ms / (cost_ms + window_ms)
