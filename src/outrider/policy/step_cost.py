"""Fits the cost of a step on a rank: a fixed time and a time per sample.

Does not split batches; it only predicts.
Called by the splitter with the measured time of every shared step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

FORGETTING = 0.97
# If sizes spread by less than 10 %, noise would decide between fixed and per-sample cost.
VARIANCE_MIN = 0.01
FIT_OBSERVATIONS = 5
# On launch-bound devices samples seem free; without this limit, such a device would get the whole batch.
PER_SAMPLE_PART_MIN = 0.05
# A time that is off by this factor is a hiccup and is clipped; three in a row on one side are a change of speed.
HICCUP = 1.5
HICCUPS_IN_A_ROW = 3
CLIPPING_OBSERVATIONS = 3


class Cost(Protocol):
    """Time of a rank as a function of its samples: fixed + per sample; zero samples cost nothing."""

    @property
    def fixed_ms(self) -> float: ...

    @property
    def per_sample_ms(self) -> float: ...


@dataclass(frozen=True, slots=True)
class GivenCost:
    """A given cost, not measured."""

    fixed_ms: float
    per_sample_ms: float


class TimeModel:
    """Time of a rank's step, fitted to observations by least squares with exponential forgetting.

    While all observations have about the same size, only the level is fitted; the ratio of fixed to per-sample cost
    stays as last known. Before anything is known, the cost is purely per sample.
    """

    __slots__ = ("_num_observed", "_num_off", "_sums", "fixed_ms", "per_sample_ms")

    def __init__(self, fixed_ms: float = 0.0, per_sample_ms: float = 0.0) -> None:
        self.fixed_ms = fixed_ms
        self.per_sample_ms = per_sample_ms
        # Sums with forgetting of 1, size, size², time and size × time.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._num_observed = 0
        # Number of consecutive times that were too long (positive) or too short (negative).
        self._num_off = 0

    @property
    def num_observed(self) -> int:
        """Steps since the last change of speed."""
        return self._num_observed

    @property
    def is_known(self) -> bool:
        return self.per_sample_ms > 0

    def observe(self, samples: int, ms: float) -> bool:
        """Add one step; returns whether the rank's speed has changed."""
        has_shifted = False
        if self._num_observed >= CLIPPING_OBSERVATIONS:
            expected_ms = self.fixed_ms + self.per_sample_ms * samples
            has_shifted = self._count_off(ms, expected_ms)
            if has_shifted:
                self._forget()
            else:
                ms = max(expected_ms / HICCUP, min(expected_ms * HICCUP, ms))
        weight, size, size_size, time, size_time = self._sums
        self._sums = (
            FORGETTING * weight + 1,
            FORGETTING * size + samples,
            FORGETTING * size_size + samples * samples,
            FORGETTING * time + ms,
            FORGETTING * size_time + samples * ms,
        )
        self._num_observed += 1
        return has_shifted

    def fit(self) -> None:
        """Update the coefficients; separate from `observe`, which runs at every step."""
        weight, size, size_size, time, size_time = self._sums
        if weight == 0:
            return
        mean_size, mean_ms = size / weight, time / weight
        variance = size_size / weight - mean_size * mean_size
        if self._num_observed >= FIT_OBSERVATIONS and variance > VARIANCE_MIN * mean_size * mean_size:
            self._fit_line(mean_size, mean_ms, (size_time / weight - mean_size * mean_ms) / variance)
        elif self.is_known:
            scale = mean_ms / (self.fixed_ms + self.per_sample_ms * mean_size)
            self.fixed_ms *= scale
            self.per_sample_ms *= scale
        else:
            self.per_sample_ms = mean_ms / mean_size

    def state(self) -> dict[str, Any]:
        return {
            "fixed_ms": self.fixed_ms,
            "per_sample_ms": self.per_sample_ms,
            "sums": list(self._sums),
            "num_observed": self._num_observed,
            "num_off": self._num_off,
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> TimeModel:
        model = cls(state["fixed_ms"], state["per_sample_ms"])
        weight, size, size_size, time, size_time = state["sums"]
        model._sums = (weight, size, size_size, time, size_time)
        model._num_observed = state["num_observed"]
        model._num_off = state["num_off"]
        return model

    def _forget(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._num_observed = 0
        self._num_off = 0

    def _count_off(self, ms: float, expected_ms: float) -> bool:
        if ms > HICCUP * expected_ms:
            self._num_off = max(0, self._num_off) + 1
        elif ms * HICCUP < expected_ms:
            self._num_off = min(0, self._num_off) - 1
        else:
            self._num_off = 0
        return abs(self._num_off) >= HICCUPS_IN_A_ROW

    def _fit_line(self, mean_size: float, mean_ms: float, slope: float) -> None:
        proportional = mean_ms / mean_size
        self.per_sample_ms = max(PER_SAMPLE_PART_MIN * proportional, min(proportional, slope))
        self.fixed_ms = max(0.0, mean_ms - self.per_sample_ms * mean_size)


def slowest_ms(models: Sequence[Cost], samples: Sequence[int]) -> float:
    """Predicted time of the slowest rank."""
    return max(
        (m.fixed_ms + m.per_sample_ms * count for m, count in zip(models, samples, strict=True) if count), default=0.0
    )
