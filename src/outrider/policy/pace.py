"""Learns the pace of one rank: ms per full batch, smoothed.

Does not measure and does not plan: compute times come from the drivers, plans from the planner.
Called by the planner with the facts of every average.
"""

from __future__ import annotations

from typing import Any

GAIN_MIN = 0.1
GAIN_MAX = 0.8
# With 4, a lasting error of 20 % gets the full gain, and jitter of 10 % stays near the lowest.
GAIN_PER_BIAS = 4.0


class Pace:
    """Smoothed ms per full batch of one rank.

    The gain follows the smoothed *signed* prediction error: jitter cancels out in it, a change of speed does not.
    """

    __slots__ = ("_bias", "_ms")

    def __init__(self, ms: float | None = None) -> None:
        self._ms = ms
        self._bias = 0.0

    @property
    def ms(self) -> float | None:
        return self._ms

    def observe(self, *, compute_ms: float, samples: int, batch_size: int) -> None:
        """Learn from one window; ignores windows without samples or without a measured time."""
        if samples == 0 or compute_ms <= 0:
            return
        seen_ms = compute_ms * batch_size / samples
        if self._ms is None:
            self._ms = seen_ms
            return
        # Bounded, so that one hiccup of 10x cannot keep the gain high for many windows.
        error = max(-1.0, min(1.0, seen_ms / self._ms - 1.0))
        self._bias = 0.5 * self._bias + 0.5 * error
        gain = max(GAIN_MIN, min(GAIN_MAX, GAIN_PER_BIAS * abs(self._bias)))
        self._ms += gain * (seen_ms - self._ms)

    def state(self) -> dict[str, Any]:
        return {"ms": self._ms, "bias": self._bias}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Pace:
        pace = cls(state["ms"])
        pace._bias = state["bias"]
        return pace
