"""The tables of the report for one model, as headers and cells.

Decides what is shown of a mode and with how many digits; the page and the text lay the same cells out.
Knows no torch. Called by the markdown report and by the report's page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.report.claims import SCALES, quality
from outrider.bench.report.timing_words import timing_note
from outrider.bench.statistics import Interval
from outrider.bench.suite.groups import Group
from outrider.bench.suite.summary import ModeSummary
from outrider.bench.tables import UNKNOWN, number

_GIB = 2**30
_NUM_ANCHORS = 8
"""More changes than this are cut in their middle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    title: str
    headers: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""
    """What has to be known to read it."""


def results_table(group: Group, summaries: Mapping[str, ModeSummary]) -> Table:
    metric = group.subject.metric
    headers = ("mode", metric, "samples/s", "efficiency", "of ceiling", "speed-up", _target_header(group), "waiting")
    rows = [_result(group, one) for one in summaries.values()]
    return Table(title="Results", headers=headers, rows=rows, note=timing_note(group))


def _target_header(group: Group) -> str:
    target = group.subject.target
    if target is None:
        return "to target"
    return f"to {target:.1%}" if group.subject.metric == "accuracy" else f"to {target:g}"


def _result(group: Group, summary: ModeSummary) -> list[str]:
    is_solo = summary.mode.startswith("solo-")
    return [
        summary.mode,
        evaluation(summary.eval, summary.eval_ci95, metric=group.subject.metric),
        number(summary.samples_per_s, ",.0f"),
        UNKNOWN if is_solo else with_interval(summary.efficiency, summary.efficiency_ci95, ".2f"),
        UNKNOWN if is_solo else number(summary.of_ceiling, ".2f"),
        UNKNOWN if summary.speedup is None else f"{summary.speedup:.2f}x",
        time_to_target(summary, has_target=group.subject.target is not None),
        number(summary.wait_fraction, ".0%"),
    ]


def evaluation(value: float | None, ci95: Interval | None, *, metric: str) -> str:
    """With half the width of its interval: 98.91 ± 0.12 %, or 1.572 ± 0.011."""
    if value is None:
        return UNKNOWN
    factor, digits, unit, _ = SCALES[metric]
    spread = "" if ci95 is None else f" ± {factor * (ci95.high - ci95.low) / 2:.{digits}f}"
    return f"{factor * value:.{digits}f}{spread}{unit}"


def with_interval(value: float | None, ci95: Interval | None, pattern: str) -> str:
    spread = "" if ci95 is None else f" ({ci95.low:{pattern}} to {ci95.high:{pattern}})"
    return number(value, pattern) + spread


def time_to_target(summary: ModeSummary, *, has_target: bool) -> str:
    if not has_target or not summary.evals:
        return UNKNOWN
    if summary.time_to_target_s is not None:
        return f"{summary.time_to_target_s:.1f} s"
    if summary.is_reached_by_all:
        return UNKNOWN
    return f"reached by {summary.num_reached} of {len(summary.seeds)}"


def quality_table(group: Group, summaries: Mapping[str, ModeSummary]) -> Table:
    headers = ("mode", "difference to solo-0", "95 % interval", "p of the two one-sided tests", "verdict")
    factor, digits, _, unit = SCALES[group.subject.metric]
    rows = [
        [
            one.mode,
            f"{factor * one.difference:+.{digits}f}{unit}",
            UNKNOWN
            if one.ci95 is None
            else f"{factor * one.ci95.low:+.{digits}f} to {factor * one.ci95.high:+.{digits}f}",
            UNKNOWN if one.test is None else f"{one.test.p_value:.3f}",
            one.verdict,
        ]
        for one in quality(group, summaries)
    ]
    return Table(title="Quality against one device alone", headers=headers, rows=rows)


def averages_table(summaries: Mapping[str, ModeSummary]) -> Table:
    headers = ("mode", "averages", "ms each", "of the time", "share by rank", "anchor, first seed")
    rows = [
        [
            one.mode,
            number(one.averages, ",.0f"),
            number(one.average_ms, ".2f"),
            number(one.exposed_average_fraction, ".1%"),
            " / ".join(f"{share:.0%}" for share in one.share_by_rank),
            anchor_history(one.anchors[0] if one.anchors else ()),
        ]
        for one in summaries.values()
        if one.averages
    ]
    return Table(title="Averages and anchors", headers=headers, rows=rows)


def anchor_history(anchors: Sequence[int]) -> str:
    """20 → 24 → 31; a long one without its middle."""
    shown = [str(anchor) for anchor in anchors]
    if len(shown) > _NUM_ANCHORS:
        half = _NUM_ANCHORS // 2
        shown = [*shown[:half], f"… {len(shown) - _NUM_ANCHORS} more …", *shown[-half:]]
    return " → ".join(shown) or UNKNOWN


def idle_table(summaries: Mapping[str, ModeSummary]) -> Table:
    """What ranks recorded by cause; beside it what the sampled utilization saw, short waits left out."""
    known = {mode: one for mode, one in summaries.items() if one.idle_s_by_cause is not None}
    causes = list(dict.fromkeys(cause for one in known.values() for cause in one.idle_s_by_cause or ()))
    rows = [
        [
            mode,
            *(number((one.idle_s_by_cause or {}).get(cause), ".2f") for cause in causes),
            number(one.idle_s, ".2f"),
            _sampled(one.sampled_idle_s_by_cause),
        ]
        for mode, one in known.items()
    ]
    title = "Idle by cause, seconds per run, all ranks"
    return Table(title=title, headers=("mode", *causes, "sum", "sampled"), rows=rows)


def _sampled(seconds: Mapping[str, float] | None) -> str:
    """The sum, and the cause of most of it."""
    if seconds is None:
        return UNKNOWN
    cause = max(seconds, key=lambda name: seconds[name], default="")
    most = f", most of it {cause}" if seconds.get(cause) else ""
    return f"{sum(seconds.values()):.2f}{most}"


def memory_table(summaries: Mapping[str, ModeSummary]) -> Table:
    known = {mode: one.peak_memory_bytes_by_rank for mode, one in summaries.items() if one.peak_memory_bytes_by_rank}
    num_ranks = max((len(peaks) for peaks in known.values()), default=0)
    rows = [[mode, *(_gib(peaks, rank) for rank in range(num_ranks))] for mode, peaks in known.items()]
    return Table(title="Peak memory, GiB", headers=("mode", *(f"rank {rank}" for rank in range(num_ranks))), rows=rows)


def _gib(peaks: Sequence[int | None], rank: int) -> str:
    peak = peaks[rank] if rank < len(peaks) else None
    return UNKNOWN if peak is None else f"{peak / _GIB:.2f}"
