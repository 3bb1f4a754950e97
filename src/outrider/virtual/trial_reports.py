"""Reads the reports of a short real run and finds what its steps and averages took.

Decides which reports count and how times are told apart: steps, averages, and the rest. Measures and simulates nothing.
Called by `virtual.advice`; `rank.trial_log` writes the files. Knows no torch.
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
"""The kind of report that a rank gives while it works alone, in a world of its own or beside others that rest."""
LEAST_REPORTS = 6
"""Fewer say nothing."""
WARM_UP_PART = 0.2
WARM_UP_STEPS, WARM_UP_WINDOWS = 5, 2
"""Reports that do not count, at least: caches, allocators and clocks of devices are cold."""
HICCUP = 4.0
"""A time of more than so many medians counts as so many: once in a short run would be once in every short run."""
JITTER_MOST = 0.3
PER_SAMPLE_PART_MIN = 0.05
"""As in `policy.step_cost`: launch-bound devices look as if samples were free."""
SIZES_APART = 1.2
"""Fixed and per-sample cost are told apart where batches differ by this factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWindow:
    """One rank's part of a report; times as in `policy.effects.RankFacts`."""

    samples: int
    batches: int
    compute_ms: float
    exposed_ms: float = 0.0
    waited_ms: float = 0.0
    average_ms: float = 0.0
    setup_ms: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialReport:
    """One report of a trial run, and how long after the last one it came."""

    kind: str
    """shared, average, background or confer."""
    wall_ms: float | None
    """None for the first of the run."""
    ranks: tuple[RankWindow, ...]
    is_first: bool = False
    """Of its epoch: its time is also that in which the epoch before ended."""

    @property
    def samples(self) -> int:
        return sum(rank.samples for rank in self.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialReports:
    """What a trial run left behind."""

    policy: str
    devices: tuple[str, ...]
    reports: tuple[TrialReport, ...]
    peak_memory_bytes: tuple[int | None, ...]
    model_bytes: int
    """What an average sends."""
    parameters: int
    """Trained ones."""

    def of_kind(self, kind: str) -> tuple[TrialReport, ...]:
        """The reports of this kind without those of the warm-up."""
        found = [report for report in self.reports if report.kind == kind]
        least = WARM_UP_STEPS if kind == "shared" else WARM_UP_WINDOWS
        return tuple(found[min(max(least, round(WARM_UP_PART * len(found))), len(found) // 2) :])


def count_reports(folder: Path) -> int:
    """The reports so far of a trial that may still run."""
    try:
        return max(0, (folder / FOLDER / "rank0.jsonl").read_bytes().count(b"\n") - 1)
    except OSError:
        return 0


def read_trial(folder: Path, *, policy: str, devices: Sequence[str], name: str | None = None) -> TrialReports:
    """The reports of a trial run; raises a DataError if they are too few to measure anything."""
    lines = _lines(folder / FOLDER / "rank0.jsonl")
    told = [line for line in lines if "kind" in line]
    # A rank alone reports several steps at once.
    num = sum(max(1, line["ranks"][0]["batches"]) if line["kind"] == ALONE else 1 for line in told)
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


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    # A rank that was killed may leave half a line.
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


# What they say


def samples_per_s(reports: Sequence[TrialReport]) -> float:
    """Throughput within epochs, from the wall clock; with their ends where every epoch has only one report."""
    told = _within_epochs([report for report in reports if report.wall_ms and report.samples])
    timed = [(report.samples, report.wall_ms) for report in told if report.wall_ms is not None]
    return sum(samples for samples, _ in timed) / sum(_clipped(timed)) * 1e3


def _within_epochs(reports: Sequence[TrialReport]) -> list[TrialReport]:
    return [report for report in reports if not report.is_first] or list(reports)


def device_speed(observed: Sequence[tuple[int, float]], *, overhead_ms: float = 0.0) -> DeviceSpeed:
    """The line through observed (samples, ms) of steps; its mean is theirs. `overhead_ms` comes on top of each step."""
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
    # A log-normal factor has a mean above 1; the mean time is what was measured.
    shrink = math.exp(-(jitter**2) / 2)
    return DeviceSpeed(
        per_sample_ms=per_sample_ms * shrink, fixed_ms=(fixed_ms + overhead_ms) * shrink, jitter=round(jitter, 4)
    )


def _jitter(ratios: Sequence[float]) -> float:
    logarithms = [math.log(ratio) for ratio in ratios]
    return min(JITTER_MOST, stdev(logarithms)) if len(logarithms) > 1 else 0.0


def _clipped(observed: Sequence[tuple[int, float]]) -> list[float]:
    """The times, those of hiccups cut; judged per sample, since batches differ."""
    usual = median(ms / samples for samples, ms in observed)
    return [min(ms, HICCUP * usual * samples) for samples, ms in observed]


def steps_of(reports: Sequence[TrialReport], rank: int) -> list[tuple[int, float]]:
    """A rank's samples and time per step; of a window the mean step."""
    return [
        (round(own.samples / own.batches), own.compute_ms / own.batches)
        for own in (report.ranks[rank] for report in reports)
        if own.batches and own.compute_ms > 0 and own.setup_ms == 0
    ]


def stretch_overhead_ms(reports: Sequence[TrialReport]) -> float:
    """Per step of a rank alone: what is no step. 0 where every epoch has one report, and its end cannot be told."""
    told = [
        (report.wall_ms, max(report.ranks, key=lambda rank: rank.batches))
        for report in reports
        if report.wall_ms is not None and not report.is_first
    ]
    rests_ms = [wall_ms - own.compute_ms - own.setup_ms for wall_ms, own in told]
    return max(0.0, sum(rests_ms)) / max(1, sum(own.batches for _, own in told))


def stretch_speed(trials: Sequence[Sequence[TrialReport]]) -> DeviceSpeed:
    """Of a rank alone, in trials whose reports tell of one step or of many: each of them counts."""
    steps = [step for reports in trials for one in reports for step in steps_of([one], 0) * one.ranks[0].batches]
    return device_speed(steps, overhead_ms=fmean(map(stretch_overhead_ms, trials)))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingCost:
    """What a blocking average takes besides the steps of the slowest rank."""

    average_ms: float
    overhead_ms: float
    """Per step of a rank: what is neither step nor average."""


def meeting_cost(reports: Sequence[TrialReport]) -> MeetingCost:
    """Of shared steps and of blocking averages: all ranks leave one together, so their wall time is the same."""
    averages_ms, rests_ms = [], []
    for report, after in pairwise(reports):
        if report.wall_ms is None or report.is_first or after.is_first:
            continue
        steps_ms = max(rank.compute_ms + rank.setup_ms for rank in report.ranks)
        # What an average took is told with the next one; the last rank to join it waited for nobody.
        average_ms = min(rank.exposed_ms for rank in after.ranks)
        averages_ms.append(average_ms)
        batches = max(1, *(rank.batches for rank in report.ranks))
        rests_ms.append((report.wall_ms - steps_ms - average_ms) / batches)
    if not averages_ms:
        # One per epoch: what is neither step nor average cannot be told from the end of the epoch.
        told_ms = [min(rank.exposed_ms for rank in report.ranks) for report in reports[1:]]
        return MeetingCost(average_ms=_typical(told_ms) if told_ms else 0.0, overhead_ms=0.0)
    return MeetingCost(average_ms=_typical(averages_ms), overhead_ms=max(0.0, _typical(rests_ms)))


@dataclass(frozen=True, kw_only=True, slots=True)
class BackgroundCost:
    """What an average in the background takes."""

    average_ms: float
    """From when the last rank has joined until it is done."""
    snapshot_ms: float
    """From the computing of each rank."""
    overhead_ms: float


def background_cost(reports: Sequence[TrialReport]) -> BackgroundCost:
    """Of averages in the background; each rank goes on, so only rank 0, whose clock was read, tells its wall time."""
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
    """What the end of an epoch and the start of the next take besides steps and averages; 0 where none was seen.

    In a blocking average all ranks meet; in the background only rank 0, whose clock was read, tells its wall time.
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
    """The mean, with hiccups cut."""
    usual = median(values_ms)
    return fmean(min(value, HICCUP * usual) if usual > 0 else value for value in values_ms)
