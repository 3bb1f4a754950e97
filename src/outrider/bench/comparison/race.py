"""Which policy reaches the target first, from the times of repeated runs.

Decides when there is a verdict: not where intervals overlap, and not for a policy with runs that never reach the
target. Measures nothing. Called by `comparison_runs` and tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.bench.statistics import Interval, mean, student_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class RaceRun:
    """One run of the script; times are from the start of its first epoch."""

    policy: str
    seed: int
    seconds: float | None
    """When the target was reached; None if never."""
    epochs: int
    best: float | None
    """The best value of the metric."""
    error: str | None = None
    """Why the run failed before it reached the target."""

    @property
    def missed_in_words(self) -> str:
        """How a run ended that never reached the target."""
        if self.error is not None:
            return f"failed after {self.epochs} epochs: {self.error}"
        return f"never in {self.epochs} epochs, best {self.best:.4g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RaceStanding:
    """All runs of one policy."""

    policy: str
    seconds: tuple[float, ...]
    missed: tuple[RaceRun, ...]
    interval: Interval | None
    """Of the mean, where all runs reached the target and there are two or more."""

    @property
    def num_runs(self) -> int:
        return len(self.seconds) + len(self.missed)

    @property
    def mean_s(self) -> float | None:
        """None if a run never reached the target: the time of the others alone would be too short."""
        return mean(self.seconds) if self.seconds and not self.missed else None


def standings(runs: Sequence[RaceRun]) -> list[RaceStanding]:
    """By policy, in the order of the runs."""
    return [_standing(policy, [run for run in runs if run.policy == policy]) for policy in _names(runs)]


def _names(runs: Sequence[RaceRun]) -> list[str]:
    return list(dict.fromkeys(run.policy for run in runs))


def _standing(policy: str, runs: Sequence[RaceRun]) -> RaceStanding:
    seconds = tuple(run.seconds for run in runs if run.seconds is not None)
    missed = tuple(run for run in runs if run.seconds is None)
    return RaceStanding(
        policy=policy, seconds=seconds, missed=missed, interval=None if missed else student_interval(seconds)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RaceVerdict:
    """Who is first, and why; `first` is None without a verdict."""

    first: str | None
    reason: str


def verdict(table: Sequence[RaceStanding]) -> RaceVerdict:
    """Compare those that reached the target in every run."""
    complete = sorted((one for one in table if one.mean_s is not None), key=lambda one: one.mean_s or 0.0)
    if not complete:
        return RaceVerdict(first=None, reason="no policy reached the target in all of its runs")
    best = complete[0]
    if any(one.interval is None for one in complete):
        return RaceVerdict(first=None, reason="one run shows no spread: use two seeds or more")
    close = [one.policy for one in complete[1:] if _overlap(best, one)]
    if close:
        return RaceVerdict(first=None, reason=f"the intervals of {best.policy} and {', '.join(close)} overlap")
    if len(complete) == 1:
        return RaceVerdict(first=best.policy, reason="the only one that reached the target in all of its runs")
    following = complete[1]
    assert best.mean_s is not None
    assert following.mean_s is not None
    ratio = following.mean_s / best.mean_s
    return RaceVerdict(first=best.policy, reason=f"{following.policy}, the next, takes {ratio:.2f} times as long")


def _overlap(first: RaceStanding, second: RaceStanding) -> bool:
    assert first.interval is not None
    assert second.interval is not None
    return first.interval.high >= second.interval.low
