"""A comparison as text of at most 80 columns, and as JSON.

Decides the words and the layout. Called by `outrider compare`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outrider.bench.comparison.comparison_runs import PolicyComparison
from outrider.bench.comparison.race import RaceRun, RaceStanding, standings, verdict


def as_text(comparison: PolicyComparison, runs: Sequence[RaceRun]) -> str:
    """A row per policy, the runs that missed the target, the verdict."""
    table = standings(runs)
    lines = [
        f"seconds to {comparison.target}, on {','.join(comparison.devices)}"[:80],
        "",
        f"{'policy':<12}{'reached':>9}{'mean':>11}{'95 % interval':>23}{'slowest':>11}",
        *map(_row, table),
        "",
    ]
    for one in table:
        lines += [f"{run.policy}, seed {run.seed}: {run.missed_in_words}" for run in one.missed]
    told = verdict(table)
    lines.append(f"first: {told.first}; {told.reason}" if told.first else f"no verdict: {told.reason}")
    return "\n".join(lines)


def _row(one: RaceStanding) -> str:
    mean = "-" if one.mean_s is None else f"{one.mean_s:,.2f}"
    interval = "-" if one.interval is None else f"{one.interval.low:,.2f} to {one.interval.high:,.2f}"
    slowest = f"{max(one.seconds):,.2f}" if one.seconds else "-"
    reached = f"{len(one.seconds)} of {one.num_runs}"
    return f"{one.policy:<12}{reached:>9}{mean:>11}{interval:>23}{slowest:>11}"


def as_document(comparison: PolicyComparison, runs: Sequence[RaceRun]) -> dict[str, Any]:
    """All of it, with the seconds of every run."""
    table = standings(runs)
    told = verdict(table)
    return {
        **comparison.identity(),
        "policies": [
            {
                "policy": one.policy,
                "runs": one.num_runs,
                "seconds": list(one.seconds),
                "mean_s": one.mean_s,
                "interval_s": None if one.interval is None else [one.interval.low, one.interval.high],
                "missed": [asdict(run) for run in one.missed],
            }
            for one in table
        ],
        "first": told.first,
        "reason": told.reason,
    }
