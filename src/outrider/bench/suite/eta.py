"""How long the rest of a sweep takes, from how long its runs have taken so far.

Decides the estimate only; who asks for it shows it. Called by the progress of `bench run` and `bench sweep`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from outrider.bench.statistics import mean
from outrider.bench.suite.case import Case


class Eta:
    """Learns from each run that ended; runs of the same model and mode take about as long as each other."""

    def __init__(self, cases: Sequence[Case], *, num_jobs: int = 1) -> None:
        self._left = list(cases)
        self._num_jobs = num_jobs
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(list)

    @property
    def num_left(self) -> int:
        return len(self._left)

    def skipped(self, case: Case) -> None:
        self._left.remove(case)

    def ended(self, case: Case, seconds: float) -> None:
        self._left.remove(case)
        self._seconds[case.model, case.mode].append(seconds)

    def left_s(self, *, elapsed_s: float = 0.0) -> float | None:
        """Seconds to the end of the sweep, with `elapsed_s` of the runs under way gone; None before the first ended."""
        if not self._seconds or not self._left:
            return None if self._left else 0.0
        of_all_s = max(0.0, sum(self._expected_s(case) for case in self._left) - elapsed_s)
        return of_all_s / min(self._num_jobs, len(self._left))

    def _expected_s(self, case: Case) -> float:
        """From runs like it: of this model and mode, else of this model, else of any."""
        for alike in (
            self._seconds.get((case.model, case.mode), ()),
            [one for (model, _), known in self._seconds.items() if model == case.model for one in known],
            [one for known in self._seconds.values() for one in known],
        ):
            if alike:
                return mean(list(alike))
        raise AssertionError("asked only when a run has ended")


def duration(seconds: float) -> str:
    """For a person who waits: 45 s, 7 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
