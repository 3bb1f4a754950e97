"""The verdict on a mode compared with one device alone: as good, better, worse, or no evidence.

Decides margins and words; `statistics` has the tests. Imports no torch. Called by the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from outrider.bench.statistics import Equivalence, Interval, difference_interval, equivalence
from outrider.bench.suite.groups import INDEPENDENT, SOLO, Group
from outrider.bench.suite.suite_summary import ModeSummary

MIN_SEEDS = 3
"""Fewer allow no claim about quality."""
ACCURACY_MARGIN = 0.005
"""Half a point: the difference between runs of the same seed on real hardware."""
RELATIVE_MARGIN = 0.02
"""Of the solo's value, for losses and errors."""

AS_GOOD = "as good as solo"
BETTER = "better than solo"
WORSE = "worse than solo"
NO_EVIDENCE = "no evidence of equality"
TOO_FEW = f"needs {MIN_SEEDS} seeds"


class Scale(NamedTuple):
    """How an evaluation is written: times a factor, with so many digits, and the units of it and of a difference."""

    factor: float
    digits: int
    unit: str = ""
    unit_of_difference: str = ""


SCALES = {"accuracy": Scale(100.0, 2, " %", " points"), "mse": Scale(1.0, 6), "loss": Scale(1.0, 4)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """A mode's evaluation compared with that of the first device alone."""

    mode: str
    verdict: str
    difference: float
    ci95: Interval | None
    test: Equivalence | None


def trains_together(mode: str) -> bool:
    """Whether a mode trains one model on all devices."""
    return not mode.startswith("solo-") and mode != INDEPENDENT


def margin(group: Group, solo: ModeSummary) -> float:
    if group.subject.metric == "accuracy":
        return ACCURACY_MARGIN
    return RELATIVE_MARGIN * abs(solo.eval or 0.0)


def quality(group: Group, summaries: Mapping[str, ModeSummary]) -> list[Quality]:
    """Every mode that trains one model on all devices, against the solo; empty if there is no solo."""
    solo = summaries.get(SOLO)
    if solo is None or not solo.evals:
        return []
    return [
        _judge(group, summary, solo) for mode, summary in summaries.items() if trains_together(mode) and summary.evals
    ]


def _judge(group: Group, summary: ModeSummary, solo: ModeSummary) -> Quality:
    assert summary.eval is not None
    assert solo.eval is not None
    ci95 = difference_interval(summary.evals, solo.evals)
    test = equivalence(summary.evals, solo.evals, margin=margin(group, solo))
    has_enough = min(len(summary.evals), len(solo.evals)) >= MIN_SEEDS
    return Quality(
        mode=summary.mode,
        verdict=_verdict(ci95, test, larger_is_better=group.subject.larger_is_better) if has_enough else TOO_FEW,
        difference=summary.eval - solo.eval,
        ci95=ci95,
        test=test,
    )


def _verdict(ci95: Interval | None, test: Equivalence | None, *, larger_is_better: bool) -> str:
    """Within the margin it is as good, even where a small difference is certain."""
    if ci95 is None or test is None:
        return TOO_FEW
    if test.is_shown:
        return AS_GOOD
    if ci95.holds(0.0):
        return NO_EVIDENCE
    return BETTER if (ci95.low > 0) == larger_is_better else WORSE


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The mode to take for a model, and why."""

    mode: str | None
    reason: str


def best_mode(group: Group, summaries: Mapping[str, ModeSummary]) -> Best:
    """The first mode at the target among those not worse than solo; without times, the one with the best evaluation."""
    worse = {one.mode for one in quality(group, summaries) if one.verdict == WORSE}
    candidates = [one for mode, one in summaries.items() if trains_together(mode) and mode not in worse]
    if not candidates:
        return Best(mode=None, reason="no mode that trains on all devices is finished and not worse than solo")
    arrived = [one for one in candidates if one.is_reached_by_all]
    timed = [(one.time_to_target_s, one.mode) for one in arrived if one.time_to_target_s is not None]
    if timed:
        among = "" if len(timed) == len(arrived) else ", of those that were timed"
        return Best(mode=min(timed)[1], reason=f"soonest at the target in every seed{among}")
    sign = 1.0 if group.subject.larger_is_better else -1.0
    learned = [(sign * one.eval, one.mode) for one in candidates if one.eval is not None]
    if learned:
        why = "not timed" if arrived else "none reached the target in every seed"
        return Best(mode=max(learned)[1], reason=f"{why}; best evaluation")
    return Best(mode=max(candidates, key=lambda one: one.samples_per_s or 0.0).mode, reason="most samples per second")


def shortcomings(group: Group, summaries: Mapping[str, ModeSummary]) -> list[str]:
    """Where a mode is worse than the first device alone, one plain sentence each."""
    solo = summaries.get(SOLO)
    if solo is None:
        return []
    judged = {one.mode: one for one in quality(group, summaries)}
    found = []
    for mode, summary in summaries.items():
        if not trains_together(mode):
            continue
        parts = [*_slower(summary), *_later(summary, solo), *_weaker(judged.get(mode), SCALES[group.subject.metric])]
        if parts:
            found.append(f"`{mode}` on {group.name}: {'; '.join(parts)}")
    return found


def _slower(summary: ModeSummary) -> list[str]:
    if summary.speedup is None or summary.speedup >= 1.0:
        return []
    return [f"fewer samples per second than {SOLO} ({summary.speedup:.2f}x)"]


def _later(summary: ModeSummary, solo: ModeSummary) -> list[str]:
    if not solo.is_reached_by_all or not summary.seeds:
        return []
    if not summary.is_reached_by_all:
        return [f"the target was reached in {summary.num_reached} of {len(summary.seeds)} seeds, by {SOLO} in all"]
    if summary.time_to_target_s is None or solo.time_to_target_s is None:
        return []
    own, alone = f"{summary.time_to_target_s:.1f} s", f"{solo.time_to_target_s:.1f} s"
    if summary.time_to_target_s <= solo.time_to_target_s or own == alone:
        return []
    return [f"later at the target than {SOLO} ({own} against {alone})"]


def _weaker(judged: Quality | None, scale: Scale) -> list[str]:
    if judged is None or judged.verdict != WORSE:
        return []
    difference = f"{scale.factor * abs(judged.difference):.{scale.digits}f}{scale.unit_of_difference}"
    return [f"worse evaluation, by {difference}"]
