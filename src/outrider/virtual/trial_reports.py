"""Reads the reports of a short real run and computes the durations of its steps and averages.

Decides which reports count, and how time is divided into steps, averages and the rest. Measures and simulates nothing.
Called by `virtual.advice`; `rank.trial_log` writes the files. Does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from outrider.errors import DataError
from outrider.virtual.simulator import DeviceSpeed

FOLDER = "trial"
ALONE = "confer"
"""The kind of report from a rank that works alone, either in a world of one rank or while the other ranks rest."""
LEAST_REPORTS = 6
"""Fewer reports are not enough to measure anything."""
WARM_UP_PART = 0.2
WARM_UP_STEPS, WARM_UP_WINDOWS = 5, 2
"""Minimum number of first reports that do not count, because caches, allocators and device clocks are cold."""
HICCUP = 4.0
"""Times are cut at this many medians; otherwise one hiccup would count as if every short run had one."""
JITTER_MOST = 0.3
PER_SAMPLE_PART_MIN = 0.05
"""Lower bound of the per-sample part of a step, as in `policy.step_cost`: in launch-bound steps it looks like 0."""
SIZES_APART = 1.2
"""Fixed and per-sample cost are separated if batch sizes differ by at least this factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWindow:
    """One rank's part of a report; the times are defined in `policy.effects.RankFacts`."""

    samples: int
    batches: int
    compute_ms: float
    exposed_ms: float = 0.0
    waited_ms: float = 0.0
    average_ms: float = 0.0
    setup_ms: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialReport:
    """One report of a trial run, with the time since the previous report."""

    kind: str
    """shared, average, background or confer."""
    wall_ms: float | None
    """Time since the previous report; None for the first report of the run."""
    ranks: tuple[RankWindow, ...]
    is_first: bool = False
    """Whether it is the first of its epoch; its time then includes the end of the previous epoch."""

    @property
    def samples(self) -> int:
        return sum(rank.samples for rank in self.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialReports:
    """All reports of a trial run."""

    policy: str
    devices: tuple[str, ...]
    reports: tuple[TrialReport, ...]
    peak_memory_bytes: tuple[int | None, ...]
    model_bytes: int
    """Bytes that an average sends."""
    parameters: int
    """Number of trained parameters."""

    @property
    def num_told(self) -> int:
        """Steps or averages that the reports tell of; a rank that works alone reports several steps at once."""
        return sum(_told(report.kind, [rank.batches for rank in report.ranks]) for report in self.reports)

    def of_kind(self, kind: str) -> tuple[TrialReport, ...]:
        """The reports of this kind, without the warm-up."""
        found = [report for report in self.reports if report.kind == kind]
        least = WARM_UP_STEPS if kind == "shared" else WARM_UP_WINDOWS
        return tuple(found[min(max(least, round(WARM_UP_PART * len(found))), len(found) // 2) :])


def count_reports(folder: Path) -> int:
    """The number of reports so far of a trial that may still be running."""
    try:
        return max(0, (folder / FOLDER / "rank0.jsonl").read_bytes().count(b"\n") - 1)
    except OSError:
        return 0


def read_trial(folder: Path, *, policy: str, devices: Sequence[str], name: str | None = None) -> TrialReports:
    """Read the reports of a trial run; raises a DataError if there are too few to measure anything."""
    lines = _lines(folder / FOLDER / "rank0.jsonl")
    told = [line for line in lines if "kind" in line]
    num = sum(_told(line["kind"], [rank["batches"] for rank in line["ranks"]]) for line in told)
    if num < LEAST_REPORTS:
        names, plural = ",".join(devices), "" if num == 1 else "s"
        raise DataError(
            f"{name or f'{policy} on {names}'} took {num} step{plural} or average{plural} before it ended, "
            f"and {LEAST_REPORTS} are needed to measure it",
            hint="let the script train longer: more epochs, more samples or smaller batches",
        )
    memory = [_peak(_lines(folder / FOLDER / f"rank{rank}.jsonl")) for rank in range(len(devices))]
    return TrialReports(
        policy=policy,
        devices=tuple(devices),
        reports=tuple(_report(line, told[i - 1] if i else None) for i, line in enumerate(told)),
        peak_memory_bytes=tuple(memory),
        model_bytes=told[-1]["bytes"],
        parameters=told[-1]["parameters"],
    )


def _told(kind: str, batches: Sequence[int]) -> int:
    """Steps or averages of a report; any rank may work alone, and reports several steps at once."""
    return max(1, *batches) if kind == ALONE else 1


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    # A rank that was killed may leave an incomplete line.
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def _peak(lines: Sequence[dict[str, Any]]) -> int | None:
    return next((line["peak_memory_bytes"] for line in reversed(lines) if "peak_memory_bytes" in line), None)


def _report(line: dict[str, Any], before: dict[str, Any] | None) -> TrialReport:
    return TrialReport(
        kind=line["kind"],
        wall_ms=None if before is None else (line["t"] - before["t"]) * 1e3,
        ranks=tuple(RankWindow(**rank) for rank in line["ranks"]),
        is_first=before is None or before["seen"] != line["seen"],
    )


# Durations computed from reports


def samples_per_s(reports: Sequence[TrialReport]) -> float:
    """Wall-clock throughput within epochs; includes the ends of epochs if every epoch has only one report."""
    told = _within_epochs([report for report in reports if report.wall_ms and report.samples])
    timed = [(report.samples, report.wall_ms) for report in told if report.wall_ms is not None]
    return sum(samples for samples, _ in timed) / sum(_clipped(timed)) * 1e3


def _within_epochs(reports: Sequence[TrialReport]) -> list[TrialReport]:
    return [report for report in reports if not report.is_first] or list(reports)


def device_speed(observed: Sequence[tuple[int, float]], *, overhead_ms: float = 0.0) -> DeviceSpeed:
    """Fit a line through observed (samples, ms) of steps, with the same mean; `overhead_ms` is added to each step."""
    observed = [(samples, ms) for samples, ms in observed if samples > 0 and ms > 0]
    assert observed, "a rank that took no step"
    times_ms = _clipped(observed)
    sizes = [samples for samples, _ in observed]
    mean_size, mean_ms = fmean(sizes), fmean(times_ms)
    per_sample_ms = mean_ms / mean_size
    if max(sizes) >= SIZES_APART * min(sizes):
        spread = sum((size - mean_size) ** 2 for size in sizes)
        slope = sum((size - mean_size) * ms for size, ms in zip(sizes, times_ms, strict=True)) / spread
        per_sample_ms = min(per_sample_ms, max(slope, PER_SAMPLE_PART_MIN * per_sample_ms))
    fixed_ms = mean_ms - per_sample_ms * mean_size
    jitter = _jitter([ms / (fixed_ms + per_sample_ms * n) for n, ms in zip(sizes, times_ms, strict=True)])
    # The simulator's log-normal factor has a mean above 1; divide by it, because the measured times are means.
    shrink = math.exp(-(jitter**2) / 2)
    return DeviceSpeed(
        per_sample_ms=per_sample_ms * shrink, fixed_ms=(fixed_ms + overhead_ms) * shrink, jitter=round(jitter, 4)
    )


def vary_apart(
    speeds: Sequence[DeviceSpeed], reports: Sequence[TrialReport], *, overhead_ms: float = 0.0
) -> tuple[DeviceSpeed, ...]:
    """The same mean steps, with only the part of their jitter that differs between the ranks of a report.

    What slows all ranks of a machine at once makes no rank wait for another. The simulator draws the jitter of each
    rank by itself. `overhead_ms` is the time per step that `speeds` contain and the reports do not.
    """
    rows = [row for report in reports if (row := _deviations(speeds, report, overhead_ms=overhead_ms)) is not None]
    size = len(speeds)
    if size < 2 or len(rows) < LEAST_REPORTS:
        return tuple(speeds)
    apart = [[own - fmean(row) for own in row] for row in rows]
    # The mean of N ranks takes 1/N of what they vary by themselves.
    widened = math.sqrt(size / (size - 1))
    jitters = [min(JITTER_MOST, widened * stdev(own)) for own in zip(*apart, strict=True)]
    return tuple(_with_jitter(speed, jitter) for speed, jitter in zip(speeds, jitters, strict=True))


def _deviations(speeds: Sequence[DeviceSpeed], report: TrialReport, *, overhead_ms: float) -> list[float] | None:
    """The logarithm of each rank's step over its usual time; None if any rank took no step."""
    steps = [steps_of([report], rank) for rank in range(len(speeds))]
    if not all(steps):
        return None
    ratios = [(ms + overhead_ms) / speed.step_ms(samples) for speed, [(samples, ms)] in zip(speeds, steps, strict=True)]
    return [math.log(min(ratio, HICCUP)) for ratio in ratios]


def _with_jitter(speed: DeviceSpeed, jitter: float) -> DeviceSpeed:
    """The speed with the same mean step."""
    factor = math.exp((speed.jitter**2 - jitter**2) / 2)
    return DeviceSpeed(
        per_sample_ms=speed.per_sample_ms * factor, fixed_ms=speed.fixed_ms * factor, jitter=round(jitter, 4)
    )


def _jitter(ratios: Sequence[float]) -> float:
    logarithms = [math.log(ratio) for ratio in ratios]
    return min(JITTER_MOST, stdev(logarithms)) if len(logarithms) > 1 else 0.0


def _clipped(observed: Sequence[tuple[int, float]]) -> list[float]:
    """The times, with hiccups cut; compared per sample, because batch sizes differ."""
    usual = median(ms / samples for samples, ms in observed)
    return [min(ms, HICCUP * usual * samples) for samples, ms in observed]


def steps_of(reports: Sequence[TrialReport], rank: int) -> list[tuple[int, float]]:
    """A rank's samples and time per step; for a window, those of its mean step."""
    return [
        (round(own.samples / own.batches), own.compute_ms / own.batches)
        for own in (report.ranks[rank] for report in reports)
        if own.batches and own.compute_ms > 0 and own.setup_ms == 0
    ]


def stretch_overhead_ms(reports: Sequence[TrialReport]) -> float:
    """Time per step of a rank alone that is not spent in steps; 0 if every epoch has only one report.

    The end of an epoch cannot be separated in that case.
    """
    told = [
        (report.wall_ms, max(report.ranks, key=lambda rank: rank.batches))
        for report in reports
        if report.wall_ms is not None and not report.is_first
    ]
    rests_ms = [wall_ms - own.compute_ms - own.setup_ms for wall_ms, own in told]
    return max(0.0, sum(rests_ms)) / max(1, sum(own.batches for _, own in told))


def stretch_speed(trials: Sequence[Sequence[TrialReport]]) -> DeviceSpeed:
    """The speed of a rank alone, from trials; a report may cover several steps, and each step counts equally."""
    steps = [step for reports in trials for one in reports for step in steps_of([one], 0) * one.ranks[0].batches]
    return device_speed(steps, overhead_ms=fmean(map(stretch_overhead_ms, trials)))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingCost:
    """The time of a blocking average, in addition to the steps of the slowest rank."""

    average_ms: float
    overhead_ms: float
    """Time per step of a rank that is spent neither in steps nor in averages."""


def meeting_cost(reports: Sequence[TrialReport]) -> MeetingCost:
    """The cost of shared steps or blocking averages; all ranks leave one together, so they have the same wall time."""
    averages_ms, rests_ms = [], []
    for report, after in pairwise(reports):
        if report.wall_ms is None or report.is_first or after.is_first:
            continue
        steps_ms = max(rank.compute_ms + rank.setup_ms for rank in report.ranks)
        # The next report has the duration of this average; the last rank to join did not wait for other ranks.
        average_ms = min(rank.exposed_ms for rank in after.ranks)
        averages_ms.append(average_ms)
        batches = max(1, *(rank.batches for rank in report.ranks))
        rests_ms.append((report.wall_ms - steps_ms - average_ms) / batches)
    if not averages_ms:
        # With one average per epoch, the overhead cannot be separated from the end of the epoch.
        told_ms = [min(rank.exposed_ms for rank in report.ranks) for report in reports[1:]]
        return MeetingCost(average_ms=_typical(told_ms) if told_ms else 0.0, overhead_ms=0.0)
    return MeetingCost(average_ms=_typical(averages_ms), overhead_ms=max(0.0, _typical(rests_ms)))


@dataclass(frozen=True, kw_only=True, slots=True)
class BackgroundCost:
    """The times of a background average."""

    average_ms: float
    """Time from when the last rank has joined until the average is done."""
    snapshot_ms: float
    """Compute time that it takes from each rank."""
    overhead_ms: float


def background_cost(reports: Sequence[TrialReport]) -> BackgroundCost:
    """The cost of background averages; ranks continue on their own, so the wall time is known for rank 0 only."""
    told = [report for report in _within_epochs(reports) if report.wall_ms is not None]
    if not told:
        return BackgroundCost(average_ms=0.0, snapshot_ms=0.0, overhead_ms=0.0)
    exposed_ms = [rank.exposed_ms - rank.waited_ms for report in told for rank in report.ranks]
    average_ms = [min(rank.average_ms for rank in report.ranks) for report in told]
    own = [report.ranks[0] for report in told]
    spent_ms = sum(rank.compute_ms + rank.setup_ms + rank.exposed_ms for rank in own)
    wall_ms = sum(report.wall_ms for report in told if report.wall_ms is not None)
    batches = max(1, sum(rank.batches for rank in own))
    return BackgroundCost(
        average_ms=_typical(average_ms),
        snapshot_ms=max(0.0, _typical(exposed_ms)),
        overhead_ms=0.0 if told[0].is_first else max(0.0, (wall_ms - spent_ms) / batches),
    )


def epoch_end_ms(reports: Sequence[TrialReport], cost: MeetingCost | BackgroundCost) -> float:
    """Time of the end of an epoch and the start of the next, without steps and averages; 0 if none was observed.

    In a blocking average all ranks meet; with background averages the wall time is known for rank 0 only.
    """
    blocks = isinstance(cost, MeetingCost)
    average_ms = cost.average_ms if isinstance(cost, MeetingCost) else cost.snapshot_ms
    ends_ms = []
    for report in reports:
        if report.is_first and report.wall_ms is not None:
            ranks = report.ranks if blocks else report.ranks[:1]
            steps_ms = max(rank.compute_ms + rank.setup_ms + cost.overhead_ms * rank.batches for rank in ranks)
            ends_ms.append(report.wall_ms - steps_ms - average_ms)
    return max(0.0, _typical(ends_ms)) if ends_ms else 0.0


def _typical(values_ms: Sequence[float]) -> float:
    """The mean of values in which hiccups are cut."""
    usual = median(values_ms)
    return fmean(min(value, HICCUP * usual) if usual > 0 else value for value in values_ms)
