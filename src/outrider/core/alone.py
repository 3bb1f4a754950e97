"""Decides when one rank takes whole batches alone while the others rest: where sharing a step costs more than it saves.

Every rank of a shared step sums gradients and repeats the whole update. For a small model that is most of a step, and
a slow rank then holds up the fast one, however few samples it has. Called by the splitter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from outrider.core.effects import Report
from outrider.core.timemodel import Cost

SHARED_STEPS = 16
"""As many are measured before they are judged."""
# Fitted while others computed too, the time of a rank alone comes out too long: where it is close, it is tried.
TRIED_BELOW = 1.15
STRETCH_MS = 1000.0
STRETCH_MIN, STRETCH_MAX = 16, 512
# The other way is tried again now and then, at a cost of about this part of the time; a trial explores, then measures.
TRIAL_STEPS = SHARED_STEPS + 8
TRIAL_PART = 0.01


class Alone:
    """Compares a rank alone with shared steps: its fitted time decides whether to try, what it really takes to stay."""

    def __init__(self) -> None:
        self.rank: int | None = None
        """Who works alone; None while all share."""
        self._shared_ms: deque[float] = deque(maxlen=SHARED_STEPS)
        self._expected_ms = 0.0
        # Steps until the other way is tried.
        self._left = 0
        self._has_warmed_up = self._is_proven = False
        self._ms, self._batches = 0.0, 0

    @property
    def stretch(self) -> int:
        """Steps until the ranks meet again: few on trial, then about a second, so that a wish to stop is heard."""
        if not self._is_proven:
            return STRETCH_MIN
        return max(STRETCH_MIN, min(STRETCH_MAX, round(STRETCH_MS / max(self._expected_ms, 1e-6))))

    def forget(self) -> None:
        """Shared steps will take another time from now on."""
        self._shared_ms.clear()

    def shared(self, report: Report, costs: Sequence[Cost], total: int) -> str | None:
        """Take in a shared step of `total` samples; the reason, where a rank goes on alone."""
        self._left -= 1
        self._shared_ms.append(max(facts.compute_ms + facts.exposed_ms for facts in report.ranks))
        if len(self._shared_ms) < SHARED_STEPS or self._left > 0:
            return None
        times_ms = [cost.fixed_ms + cost.per_sample_ms * total for cost in costs]
        alone_ms = min(times_ms)
        if alone_ms >= TRIED_BELOW * self._shared:
            self._left = SHARED_STEPS
            return None
        self.rank = times_ms.index(alone_ms)
        self._expected_ms = alone_ms
        self._left = round(TRIAL_STEPS * self._shared / max(alone_ms, 1e-6) / TRIAL_PART)
        self._has_warmed_up = self._is_proven = False
        self._ms, self._batches = 0.0, 0
        return f"a shared step takes {self._shared:.2f} ms, rank {self.rank} alone {alone_ms:.2f} ms by its fitted time"

    def alone(self, report: Report) -> str | None:
        """Take in a stretch; the reason, where steps are shared again."""
        assert self.rank is not None
        facts = report.ranks[self.rank]
        self._left -= facts.batches
        # The first stretch carries the warm-up of whole batches; a short one says little.
        if self._has_warmed_up:
            self._ms += facts.compute_ms + facts.exposed_ms
            self._batches += facts.batches
        self._has_warmed_up = True
        if self._batches >= SHARED_STEPS:
            self._expected_ms, self._ms, self._batches = self._ms / self._batches, 0.0, 0
            self._is_proven = True
            if self._expected_ms > self._shared:
                reason = f"rank {self.rank} alone takes {self._expected_ms:.2f} ms, a shared step {self._shared:.2f} ms"
                self._left = round(TRIAL_STEPS / TRIAL_PART)
                self.rank = None
                return reason
        if self._left > 0:
            return None
        self._left = 0
        self.rank = None
        return "the other ranks have rested for long, and are tried again"

    @property
    def _shared(self) -> float:
        return median(self._shared_ms)

    def state(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "shared_ms": list(self._shared_ms),
            "expected_ms": self._expected_ms,
            "left": self._left,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """What was measured in a stretch that a checkpoint cut short is measured anew."""
        self.rank = state["rank"]
        self._shared_ms = deque(state["shared_ms"], maxlen=SHARED_STEPS)
        self._expected_ms = state["expected_ms"]
        self._left = state["left"]
