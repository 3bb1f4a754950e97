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
STRETCH_MS = 2000.0
STRETCH_MIN, STRETCH_MAX = 16, 1024
# The other way is tried again now and then, at a cost of about this part of the time; a trial explores, then measures.
TRIAL_STEPS = SHARED_STEPS + 8
TRIAL_PART = 0.01
# Every trial in a row that shows nothing new halves it, down to this.
LEAST_TRIAL_PART = 0.001


class Alone:
    """Compares a rank alone with shared steps: its fitted time decides whether to try, what it really takes to stay."""

    def __init__(self) -> None:
        self.rank: int | None = None
        """Who works alone; None while all share."""
        self.lasted = 0
        """Batches of the rank that works alone, or did so last."""
        self._shared_ms: deque[float] = deque(maxlen=SHARED_STEPS)
        self._expected_ms = 0.0
        # Steps until the other way is tried.
        self._left = 0
        self._has_warmed_up = self._is_proven = False
        self._ms, self._batches = 0.0, 0
        # A trial of sharing, and what its steps have taken so far: the first ones of all are one too.
        self._is_trial = True
        self._spent_ms, self._spent_steps = 0.0, 0
        self._trial_part = TRIAL_PART

    @property
    def stretch(self) -> int:
        """Steps until the ranks meet again: few on trial, then about two seconds, so that a wish to stop is heard."""
        return _stretch(self._expected_ms) if self._is_proven else STRETCH_MIN

    def forget(self) -> None:
        """Shared steps will take another time from now on."""
        self._shared_ms.clear()

    def spent(self, report: Report) -> None:
        """Take in what any shared step took, those included in which ranks explore or capture what is new to them."""
        if self._is_trial:
            self._spent_ms += _step_ms(report)
            self._spent_steps += 1

    def shared(self, report: Report, costs: Sequence[Cost], total: int) -> str | None:
        """Take in a usual shared step, of `total` samples; the reason, where a rank goes on alone."""
        self._left -= 1
        self._shared_ms.append(_step_ms(report))
        if len(self._shared_ms) < SHARED_STEPS or self._left > 0:
            return None
        times_ms = [cost.fixed_ms + cost.per_sample_ms * total for cost in costs]
        alone_ms = min(times_ms)
        if alone_ms >= TRIED_BELOW * self._shared:
            self._left = SHARED_STEPS
            self._is_trial, self._trial_part = False, TRIAL_PART
            return None
        self.rank = times_ms.index(alone_ms)
        self.lasted = 0
        self._expected_ms = alone_ms
        # The next trial will cost what this one did, beyond as many steps alone.
        lost_ms = self._spent_ms - self._spent_steps * alone_ms if self._is_trial else 0.0
        self._left = round(max(TRIAL_STEPS * self._shared, lost_ms) / max(alone_ms, 1e-6) / self._trial_part)
        self._trial_part = max(LEAST_TRIAL_PART, self._trial_part / 2)
        self._is_trial = self._has_warmed_up = self._is_proven = False
        self._ms, self._batches = 0.0, 0
        return f"a shared step takes {self._shared:.2f} ms, rank {self.rank} alone {alone_ms:.2f} ms by its fitted time"

    def alone(self, report: Report, *, is_usual: bool = True) -> str | None:
        """Take in a stretch, judged where all its batches are usual ones; the reason, where all share again."""
        assert self.rank is not None
        facts = report.ranks[self.rank]
        self._left -= facts.batches
        self.lasted += facts.batches
        # The first stretch carries the warm-up of whole batches; a short one says little.
        if self._has_warmed_up and is_usual:
            self._ms += facts.compute_ms
            self._batches += facts.batches
        self._has_warmed_up = True
        if self._batches >= SHARED_STEPS:
            step_ms, self._ms, self._batches = self._ms / self._batches, 0.0, 0
            # Stretches on trial are short: what meeting costs is spread over as many steps as it will be.
            self._expected_ms = step_ms + facts.exposed_ms / _stretch(step_ms)
            self._is_proven = True
            if self._expected_ms > self._shared:
                reason = f"rank {self.rank} alone takes {self._expected_ms:.2f} ms, a shared step {self._shared:.2f} ms"
                self._left = round(TRIAL_STEPS / TRIAL_PART)
                self._trial_part = TRIAL_PART
                self.rank = None
                return reason
        if self._left > 0:
            return None
        self._left = 0
        self.rank = None
        self._is_trial = True
        self._spent_ms, self._spent_steps = 0.0, 0
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
            "lasted": self.lasted,
            "spent": [self._spent_ms, self._spent_steps] if self._is_trial else None,
            "trial_part": self._trial_part,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """What was measured in a stretch that a checkpoint cut short is measured anew."""
        self.rank = state["rank"]
        self._shared_ms = deque(state["shared_ms"], maxlen=SHARED_STEPS)
        self._expected_ms = state["expected_ms"]
        self._left = state["left"]
        self.lasted = state.get("lasted", 0)
        spent = state.get("spent")
        self._is_trial = spent is not None
        self._spent_ms, self._spent_steps = spent or (0.0, 0)
        self._trial_part = state.get("trial_part", TRIAL_PART)


def _step_ms(report: Report) -> float:
    return max(facts.compute_ms + facts.exposed_ms + facts.setup_ms for facts in report.ranks)


def _stretch(step_ms: float) -> int:
    return max(STRETCH_MIN, min(STRETCH_MAX, round(STRETCH_MS / max(step_ms, 1e-6))))
