"""Watches the drift of the replicas at each average, and reports when it is too large.

Does not change the anchor itself: the planner asks `wants_shrink` and `blocks_growth`.
Called by the planner with the drift of every report.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from outrider.policy.effects import Decision

# The level is a median of three: a single odd average neither alarms nor calms.
SMOOTHED = 3
# The first averages after the start reflect the warm-up of model and optimizer, not the run.
SKIPPED = 3
BASELINE = 5
# In a healthy run, drift varies from window to window by some ten percent; three times as much is no noise.
FACTOR = 3.0
FOLLOWED = 9
# Averages to wait after an action, until the smoothed level shows its effect; also calm averages before "stable".
PATIENCE = 3
STILL_RISING = 1.1
# Replaces a drift that is NaN or infinite, so that levels stay comparable and fit in JSON.
RUNAWAY = 1e30


class Guard:
    """Verdict on the drift: "stable", or "rising" once it is above the threshold.

    With a given threshold the level is the drift itself. While it stays above, the guard waits `PATIENCE` averages,
    then shrinks the window again.

    Without one the threshold is `FACTOR` times a baseline. No fixed number would do: drift depends on the model, the
    optimizer and the learning rate. The level is drift / sqrt(anchor), because replicas diverge at least as fast as a
    random walk, and a longer window must not look like divergence. The baseline is the median of the first averages
    after warm-up. It follows the level down, because decaying learning rates would blind a fixed baseline. It goes up
    only if the level stopped rising by itself after the guard acted: a plateau, as after a warm-up of the learning
    rate, is the new normal. So a slow divergence is compared with a baseline that has not moved.
    """

    def __init__(self, threshold: float | None) -> None:
        self._given = threshold
        self._baseline: float | None = None
        self._recent: list[float] = []
        self._num_skipped = 0
        self._verdict = "stable"
        self._calm = 0
        self._wait = 0
        self._acted_at = 0.0
        self._wants_shrink = False

    @property
    def threshold(self) -> float | None:
        """The level above which the guard acts; None while the guard still learns its baseline."""
        if self._given is not None:
            return self._given
        return None if self._baseline is None else FACTOR * self._baseline

    @property
    def blocks_growth(self) -> bool:
        return self._verdict == "rising"

    @property
    def wants_shrink(self) -> bool:
        """Whether the last judgement asks for a smaller anchor."""
        return self._wants_shrink

    def judge(self, drift: float | None, *, anchor: int = 1) -> Decision | None:
        """Judge the drift of a window in which the slowest rank did `anchor` batches."""
        self._wants_shrink = False
        # Exactly zero means one rank or a learning rate of zero: nothing to learn from.
        if drift is None or drift <= 0:
            return None
        level = self._observe(drift if math.isfinite(drift) else RUNAWAY, anchor)
        threshold = self.threshold
        if level is None or threshold is None:
            return None
        return self._above(level, threshold) if level > threshold else self._below(level, threshold)

    def relearn(self) -> None:
        """Learn the baseline anew, because windows of another length have another drift."""
        if self._given is None and not self.blocks_growth:
            self._baseline, self._recent = None, []

    def state(self) -> dict[str, Any]:
        names = ("baseline", "recent", "num_skipped", "verdict", "calm", "wait", "acted_at")
        return {name: getattr(self, f"_{name}") for name in names} | {"threshold": self._given}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Guard:
        guard = cls(state["threshold"])
        guard._baseline = state["baseline"]
        guard._recent = list(state["recent"])
        guard._num_skipped = state["num_skipped"]
        guard._verdict = state["verdict"]
        guard._calm = state["calm"]
        guard._wait = state["wait"]
        guard._acted_at = state["acted_at"]
        return guard

    def _observe(self, drift: float, anchor: int) -> float | None:
        is_automatic = self._given is None
        if is_automatic and self._num_skipped < SKIPPED:
            self._num_skipped += 1
            return None
        self._recent.append(drift / math.sqrt(anchor) if is_automatic else drift)
        del self._recent[:-FOLLOWED]
        if is_automatic and self._baseline is None and len(self._recent) >= BASELINE:
            self._baseline = median(self._recent)
        return median(self._recent[-SMOOTHED:])

    def _below(self, level: float, threshold: float) -> Decision | None:
        self._wait = 0
        self._calm += 1
        if self._baseline is not None and len(self._recent) == FOLLOWED:
            self._baseline = min(self._baseline, median(self._recent))
        if self._verdict == "stable" or self._calm < PATIENCE:
            return None
        return self._say("stable", level, threshold, f"below the threshold for {self._calm} averages")

    def _above(self, level: float, threshold: float) -> Decision | None:
        self._calm = 0
        if self._wait > 0:
            self._wait -= 1
            return None
        if self._given is None and self._verdict == "rising" and level < STILL_RISING * self._acted_at:
            self._baseline = level
            return self._say("stable", level, threshold, "no longer rising; taken as the new normal")
        self._wants_shrink = True
        self._wait = PATIENCE
        self._acted_at = level
        return self._say("rising", level, threshold, "above the threshold: a shorter window, no growth")

    def _say(self, verdict: str, level: float, threshold: float, why: str) -> Decision:
        self._verdict = verdict
        name = "drift" if self._given is not None else "drift / sqrt(anchor)"
        reason = f"{name} {level:.3g}, threshold {threshold:.3g}: {why}"
        return Decision("guard", verdict, reason, {"level": level, "threshold": threshold})
