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
        self._since_s = clock()
        self._totals = ActivityTotals()
        # Odd while a change is being made. A lock would cost more than the rest of the change.
        self._version = 0

    def enter(self, phase: str) -> str:
        """Enter a phase; returns the previous phase."""
        now_s = self._clock()
        totals = self._totals
        before = totals.phase
        self._version += 1
        totals.spent_s[before] += now_s - self._since_s
        totals.phase, self._since_s = phase, now_s
        self._version += 1
        return before

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Context of a phase, for work that is rare enough for a context manager."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def belonged_to(self, phase: str) -> None:
        """Count the time since the last change to this phase, which continues."""
        self._totals.phase = phase

    def move(self, source: str, target: str, seconds: float) -> None:
        """Move time from one phase to another, because a device reports only later which part was an average."""
        self._version += 1
        self._totals.spent_s[source] -= seconds
        self._totals.spent_s[target] += seconds
        self._version += 1

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
        while True:
            version, totals = self._version, self._totals
            spent_s, since_s, phase = dict(totals.spent_s), self._since_s, totals.phase
            if version == self._version and version % 2 == 0:
                break
            time.sleep(0)
        phase_s = max(0.0, self._clock() - since_s)
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
