"""The comparison with a baseline as text for 80 columns.

Decides the words; verdicts come from the comparison. Knows no torch. Called by `bench validate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.bench.report.validate import NOT_COMPARED, REGRESSION, SPEED_MARGIN, Comparison
from outrider.bench.tables import number, text_table


def render_comparisons(comparisons: Sequence[Comparison], *, baseline: Mapping[str, Any]) -> str:
    """What was compared, what was not and why, and the verdict."""
    compared = [one for one in comparisons if one.verdict != NOT_COMPARED]
    parts = [_versions(baseline)]
    if compared:
        headers = ("model", "mode", "measure", "before", "now", "change, 95 %", "verdict")
        parts.append(text_table(headers, [_row(one) for one in compared], num_names=3))
    parts += [f"{one.model} {one.mode}: not compared, {one.reason}" for one in comparisons if one not in compared]
    return "\n".join([*parts, verdict_line(comparisons)])


def _versions(baseline: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in baseline.get("versions", {}).items())
    rule = f"a regression is a loss of more than {100 * SPEED_MARGIN:g} % of the speed, and surely not noise"
    return f"baseline: {versions or 'versions not known'}\n{rule}"


def _row(one: Comparison) -> list[str]:
    assert one.ci95 is not None
    assert one.before
    low, high = (100 * value / abs(one.before) for value in (one.ci95.low, one.ci95.high))
    pattern = ",.0f" if one.measure == "samples_per_s" else ".4g"
    return [
        one.model,
        one.mode,
        "speed" if one.measure == "samples_per_s" else one.measure,
        number(one.before, pattern),
        number(one.now, pattern),
        f"{low:+.1f} to {high:+.1f} %",
        one.verdict,
    ]


def verdict_line(comparisons: Sequence[Comparison]) -> str:
    compared = sum(one.verdict != NOT_COMPARED for one in comparisons)
    regressions = sum(one.verdict == REGRESSION for one in comparisons)
    return f"{compared} compared, {regressions} regression{'' if regressions == 1 else 's'}"
