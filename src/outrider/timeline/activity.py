"""Tracks what one rank is doing now, and how its time is divided: seconds by phase, samples, averages, losses.

Decides how time is counted, in about a quarter of a microsecond per change. The driver names the phases; the recorder's
thread reads them twice a second and writes pulses, which the live page shows.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

PHASES = ("startup", "compute", "data", "join", "average", "rest", "evaluation", "epoch boundary")
"""`join` is the time from a rank's last step until it joins an average; `average` is the sum, including waits."""

_TRY_AGAIN_S = 1e-4
_MOST_TRIES = 10_000
"""A reader gives up on a consistent reading after about a second, because the rank may have stopped within a change."""


@dataclass(slots=True)
class ActivityTotals:
    """Totals since the start of the rank."""

    phase: str = "startup"
    """The current phase."""
    phase_s: float = 0.0
    """Time since the current phase began."""
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    samples: int = 0
    batches: int = 0
    averages: int = 0
    average_s: float = 0.0
    """Total duration of the averages, including background averages."""
    waited_s: float = 0.0
    """Time in averages in which the rank waited for other ranks; known one average later."""
    loss_sum: float = 0.0
    loss_samples: int = 0


class Activity:
    """The phases of one rank. Its own thread changes them; any other thread may call `totals()`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since_s: float | None = clock()
        self._totals = ActivityTotals()

    @property
    def phase(self) -> str:
        return self._totals.phase

    def enter(self, phase: str, *, at_s: float | None = None) -> float:
        """Enter a phase now, or at a time after the last change; returns the time by the clock."""
        now_s, since_s, totals = self._clock() if at_s is None else at_s, self._since_s, self._totals
        # None while a change is being made. A lock would cost more than the rest of the change.
        self._since_s = None
        # It is None here if an exception, such as that of Ctrl-C, cut a change short.
        if since_s is not None:
            totals.spent_s[totals.phase] += now_s - since_s
        totals.phase = phase
        self._since_s = now_s
        return now_s

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Context of a phase, for work that is rare enough for a context manager."""
        before = self._totals.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def belonged_to(self, phase: str) -> None:
        """Count the time since the last change to this phase, which continues."""
        self._totals.phase = phase

    def move(self, source: str, target: str, seconds: float) -> None:
        """Move time from one phase to another, because a device reports only later which part was an average."""
        since_s, self._since_s = self._since_s, None
        self._totals.spent_s[source] -= seconds
        self._totals.spent_s[target] += seconds
        # A new object, by which a reader sees that something changed.
        self._since_s = None if since_s is None else since_s + 0.0

    def stepped(self, samples: int) -> None:
        self._totals.samples += samples
        self._totals.batches += samples > 0

    def averaged(self, seconds: float) -> None:
        self._totals.averages += 1
        self._totals.average_s += seconds

    def waited(self, seconds: float) -> None:
        self._totals.waited_s += seconds

    def saw_loss(self, total: float, samples: int) -> None:
        if samples > 0 and math.isfinite(total):
            self._totals.loss_sum += total
            self._totals.loss_samples += samples

    def totals(self) -> ActivityTotals:
        """A consistent copy of the totals, including the time up to now."""
        totals = self._totals
        for _ in range(_MOST_TRIES):
            since_s = self._since_s
            spent_s, phase = dict(totals.spent_s), totals.phase
            # Every change ends with a number of its own, so the same object means that nothing changed.
            if since_s is not None and since_s is self._since_s:
                break
            time.sleep(_TRY_AGAIN_S)
        now_s = self._clock()
        phase_s = 0.0 if since_s is None else max(0.0, now_s - since_s)
        spent_s[phase] += phase_s
        return ActivityTotals(
            phase=phase,
            phase_s=phase_s,
            spent_s=spent_s,
            samples=totals.samples,
            batches=totals.batches,
            averages=totals.averages,
            average_s=totals.average_s,
            waited_s=totals.waited_s,
            loss_sum=totals.loss_sum,
            loss_samples=totals.loss_samples,
        )
