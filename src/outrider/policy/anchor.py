"""Tunes the anchor: how many batches the slowest rank does between two averages.

Short windows learn more per sample, so the anchor is the smallest whose cost stays within the target. Measures no costs
and assigns no batches. Called by the planner after every average; the guard shrinks it when replicas drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.policy.effects import Decision

# A move aims at this part of the target: noise of the cost around it reaches neither the target nor half of it.
AIM = 0.7
# Waits for other ranks grow windows only up to this anchor: if a plan is off, a longer window also waits longer.
WAIT_ANCHOR = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class AverageCost:
    """The cost of an average, in ms."""

    exposed_ms: float
    """Compute time lost to the average itself."""
    lost_ms: float = 0.0
    """`exposed_ms` plus the time that ranks waited for each other; it counts up to an anchor of `WAIT_ANCHOR`."""
    background_ms: float = 0.0
    """Time in the background from snapshot to result; a shorter window ends with a wait."""


class Anchor:
    """The number of batches of the slowest rank in a window, tuned within [minimum, maximum].

    Only the guard goes below the minimum; once the guard is satisfied, the anchor climbs back.
    """

    def __init__(self, start: int, *, minimum: int, maximum: int, overhead_target: float) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._target = overhead_target
        self._value = max(minimum, min(maximum, start))

    @property
    def value(self) -> int:
        return self._value

    def after(self, cost: AverageCost, *, batch_ms: float, may_grow: bool) -> Decision | None:
        """Follow the measured cost of an average, given the time of a batch on the slowest rank.

        The anchor stays while the cost is between half the target and the target. Otherwise it moves at once to the
        smallest value that stays below the target with some margin.
        """
        if batch_ms <= 0:
            return None
        if self._value < self._minimum:
            return self._move(self._value + 1, "the guard is content again", None) if may_grow else None
        is_above = self._value < self._smallest(1.0, cost, batch_ms)
        is_below = self._value > self._smallest(0.5, cost, batch_ms)
        if not is_below and not (is_above and may_grow):
            return None
        overhead = _part(cost.exposed_ms, self._value * batch_ms)
        reason = self._reason(cost, batch_ms, overhead) if is_above else f"{_takes(overhead)}, below half {self._limit}"
        return self._move(max(self._minimum, self._smallest(AIM, cost, batch_ms)), reason, overhead)

    def shrink(self, factor: float, reason: str) -> Decision | None:
        """Shrink by a factor, at least by one batch, down to one; a fixed anchor stays."""
        if self._minimum == self._maximum:
            return None
        return self._move(max(1, min(self._value - 1, math.floor(self._value * factor))), reason, None)

    def state(self) -> dict[str, Any]:
        return {"value": self._value}

    @classmethod
    def restored(cls, state: dict[str, Any], *, minimum: int, maximum: int, overhead_target: float) -> Anchor:
        """Restore the learned value under the options of the current run."""
        return cls(state["value"], minimum=minimum, maximum=maximum, overhead_target=overhead_target)

    @property
    def _limit(self) -> str:
        return f"the target of {self._target:.0%}"

    def _reason(self, cost: AverageCost, batch_ms: float, overhead: float) -> str:
        """Why the anchor grows."""
        if overhead > self._target:
            return f"{_takes(overhead)}, above {self._limit}"
        if cost.background_ms > self._value * batch_ms:
            return f"an average takes {cost.background_ms:.1f} ms in the background, longer than a window"
        return f"averaging and waiting take {_part(cost.lost_ms, self._value * batch_ms):.1%}, above {self._limit}"

    def _smallest(self, part: float, cost: AverageCost, batch_ms: float) -> int:
        """The smallest anchor at which averages cost at most this part of the target."""
        within = partial(smallest_within, part * self._target, batch_ms=batch_ms)
        behind = math.ceil(cost.background_ms / batch_ms / part - 1e-9)
        # An average longer than a window explains the waits; they vanish in longer windows.
        is_explained = cost.background_ms > self._value * batch_ms
        waiting = 1 if is_explained else min(WAIT_ANCHOR, within(cost_ms=cost.lost_ms))
        return max(within(cost_ms=cost.exposed_ms), behind, waiting)

    def _move(self, value: int, reason: str, overhead: float | None) -> Decision | None:
        before, self._value = self._value, min(self._maximum, value)
        if self._value == before:
            return None
        details = {"from": before, "to": self._value, "overhead": overhead}
        return Decision("anchor", self._value, f"{before} -> {self._value}: {reason}", details)


def batches_at(anchor: int, paces: Sequence[float], *, max_batch_diff: int | None = None) -> tuple[int, ...]:
    """Batches of each rank in a window: `anchor` for the slowest, for the others as many as fit in its time."""
    slowest = max(paces)
    # A rank without batches would never be measured again.
    batches = tuple(max(1, round(anchor * slowest / pace)) for pace in paces)
    if max_batch_diff is None:
        return batches
    return tuple(min(count, anchor + max_batch_diff) for count in batches)


def waste(batches: Sequence[int], paces: Sequence[float]) -> float:
    """The idle part of all ranks' time if they wait for the last one at the end of the window."""
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
        # Rounded, so that float noise does not outweigh nearness; on a tie the larger one, which averages less often.
        return round(idle, 9), abs(candidate - anchor), -candidate

    return min(near, key=cost, default=anchor)


def smallest_within(part: float, *, cost_ms: float, batch_ms: float) -> int:
    """The smallest anchor with which averages cost at most this part of the whole time."""
    # The cost of an average is fixed, so the window for a given part follows by proportion. The small term keeps float
    # noise from raising an exact anchor by one.
    return max(1, math.ceil(cost_ms / batch_ms * (1 - part) / part - 1e-9))


def _takes(overhead: float) -> str:
    return f"averaging takes {overhead:.1%}"


def _part(cost_ms: float, window_ms: float) -> float:
    return cost_ms / (cost_ms + window_ms)
