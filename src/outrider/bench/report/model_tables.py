"""The tables of one model in the report, with notes about runs that were not timed.

Decides columns and words; `groups` decides which runs show quality and which speed. Imports no torch. Called by the
report and by the text at the end of a sweep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.report.claims import SCALES, quality
from outrider.bench.statistics import Interval
from outrider.bench.suite.groups import Group
from outrider.bench.suite.suite_summary import ModeSummary
from outrider.bench.tables import UNKNOWN, number

_UNTIMED = "trained beside each other and were not timed"


def epochs_words(group: Group) -> str:
    """200 epochs, or 200 epochs for quality and 11 for speed."""
    if not (group.has_timed and group.has_untimed) or group.timed_epochs == group.case.epochs:
        return f"{group.case.epochs} epochs"
    return f"{group.case.epochs} epochs for quality and {group.timed_epochs} for speed"


def seeds_words(group: Group) -> str:
    """3 seeds, or 3 seeds for quality and 1 for speed."""
    seeds = f"{group.num_seeds} seed{'' if group.num_seeds == 1 else 's'}"
    if not (group.has_timed and group.has_untimed) or group.num_rounds == group.num_seeds:
        return seeds
    return f"{seeds} for quality and {group.num_rounds} for speed"


def timing_note(group: Group) -> str:
    """Under the table of results; empty if every run was timed."""
    if not group.has_untimed:
        return ""
    if not group.has_timed:
        return f"These runs {_UNTIMED}: a dash stands for all that is a matter of speed."
    sentences = [
        f"Quality is of runs that {_UNTIMED}, {group.case.epochs} epochs each; speed, waiting and averages are of runs "
        f"that had the machine to themselves, {group.timed_epochs} epochs each.",
        "Time to target is worked out from both: the epochs that the untimed run took to get there, times the median "
        "seconds of an epoch of the timed runs, warm-up excluded.",
        *_exceptions(group),
    ]
    return " ".join(sentences)


def _exceptions(group: Group) -> list[str]:
    """Modes that have one half only."""
    untimed = [mode for mode in group.by_mode if not group.timed(mode)]
    unjudged = [mode for mode in group.by_mode if not group.judged(mode) and _is_evaluated(group, mode)]
    whole = [mode for mode in group.by_mode if any(run.case.is_timed for run in group.judged(mode))]
    modes_by_words = {
        "Not timed, so with a dash for speed": untimed,
        "Timed only, and not long enough to be judged": unjudged,
        "Quality and speed of the same, timed runs": whole,
    }
    return [f"{words}: {', '.join(modes)}." for words, modes in modes_by_words.items() if modes]


def _is_evaluated(group: Group, mode: str) -> bool:
    return any(run.epochs[-1].eval is not None for run in group.by_mode[mode])


def timing_hint(group: Group) -> str:
    """The same at a glance, for 80 columns."""
    if not group.has_timed:
        return f"these runs {_UNTIMED}"
    return "quality is of untimed runs, speed of timed ones; time to target is worked out"


_GIB = 2**30
_NUM_ANCHORS = 8
"""More changes than this are cut in their middle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportTable:
    title: str
    headers: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""
    """Notes under the table."""


def results_table(group: Group, summaries: Mapping[str, ModeSummary]) -> ReportTable:
    metric = group.subject.metric
    headers = ("mode", metric, "samples/s", "efficiency", "of ceiling", "speed-up", _target_header(group), "waiting")
    rows = [_result(group, one) for one in summaries.values()]
    return ReportTable(title="Results", headers=headers, rows=rows, note=timing_note(group))


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


def quality_table(group: Group, summaries: Mapping[str, ModeSummary]) -> ReportTable:
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
    return ReportTable(title="Quality against one device alone", headers=headers, rows=rows)


def averages_table(summaries: Mapping[str, ModeSummary]) -> ReportTable:
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
    return ReportTable(title="Averages and anchors", headers=headers, rows=rows)


def anchor_history(anchors: Sequence[int]) -> str:
    """20 → 24 → 31; a long one without its middle."""
    shown = [str(anchor) for anchor in anchors]
    if len(shown) > _NUM_ANCHORS:
        half = _NUM_ANCHORS // 2
        shown = [*shown[:half], f"… {len(shown) - _NUM_ANCHORS} more …", *shown[-half:]]
    return " → ".join(shown) or UNKNOWN


def idle_table(summaries: Mapping[str, ModeSummary]) -> ReportTable:
    """Recorded waits by cause, and the gaps of the sampled utilization, which omit short waits."""
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
    return ReportTable(title=title, headers=("mode", *causes, "sum", "sampled"), rows=rows)


def _sampled(seconds: Mapping[str, float] | None) -> str:
    """The sum, and the cause of most of it."""
    if seconds is None:
        return UNKNOWN
    cause = max(seconds, key=lambda name: seconds[name], default="")
    most = f", most of it {cause}" if seconds.get(cause) else ""
    return f"{sum(seconds.values()):.2f}{most}"


def memory_table(summaries: Mapping[str, ModeSummary]) -> ReportTable:
    known = {mode: one.peak_memory_bytes_by_rank for mode, one in summaries.items() if one.peak_memory_bytes_by_rank}
    num_ranks = max((len(peaks) for peaks in known.values()), default=0)
    rows = [[mode, *(_gib(peaks, rank) for rank in range(num_ranks))] for mode, peaks in known.items()]
    return ReportTable(
        title="Peak memory, GiB", headers=("mode", *(f"rank {rank}" for rank in range(num_ranks))), rows=rows
    )


def _gib(peaks: Sequence[int | None], rank: int) -> str:
    peak = peaks[rank] if rank < len(peaks) else None
    return UNKNOWN if peak is None else f"{peak / _GIB:.2f}"
