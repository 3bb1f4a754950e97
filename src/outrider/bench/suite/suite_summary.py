"""Summarises the runs of a mode: quality, speed, efficiency, time to target, averages, idle time, memory.

Decides what is averaged over seeds, what is compared, and the intervals; `groups` decides which runs show quality and
which speed. Imports no torch. Called by the report, by the JSON document of `run` and `sweep`, and by the comparison
with a baseline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from outrider.bench.measures import (
    after_warm_up,
    epochs_to_target,
    mean_over_time,
    samples_per_s,
    time_to_target_s,
)
from outrider.bench.statistics import Interval, bootstrap_interval, mean, student_interval
from outrider.bench.suite.groups import INDEPENDENT, SOLO, Group
from outrider.bench.suite.runs import SuiteMeasurement, SuiteRun


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeSummary:
    """A mode over its seeds; None is not known."""

    mode: str
    seeds: tuple[int, ...]
    """The runs that show quality; other runs may show speed."""
    epochs: int
    evals: tuple[float, ...]
    """The last epoch's, one per seed; empty if the mode ends without one model, or was timed only."""
    speeds: tuple[float, ...]
    """Samples per second of training time after the warm-up, one per timed run; empty if the mode was not timed."""
    efficiency: float | None
    """Against the ideal, the sum of the solos."""
    efficiency_ci95: Interval | None
    """Student's over the rounds; of a single round by drawing its epochs again."""
    of_ceiling: float | None
    """Against `independent`: all devices at work, no averaging."""
    speedup: float | None
    """Against solo-0."""
    epochs_to_target: tuple[int | None, ...]
    """One per seed; None if it did not get there."""
    times_to_target_s: tuple[float | None, ...]
    averages: float | None
    average_ms: float | None
    exposed_average_fraction: float | None
    wait_fraction: float | None
    idle_s_by_cause: dict[str, float] | None
    """Of all ranks together, as they recorded it, mean over the seeds."""
    sampled_idle_s_by_cause: dict[str, float] | None
    """The same by the sampled utilization."""
    share_by_rank: tuple[float, ...]
    anchors: tuple[tuple[int, ...], ...]
    peak_memory_bytes_by_rank: tuple[int | None, ...]

    @property
    def eval(self) -> float | None:
        return mean(self.evals) if self.evals else None

    @property
    def eval_ci95(self) -> Interval | None:
        return student_interval(self.evals)

    @property
    def samples_per_s(self) -> float | None:
        return mean(self.speeds) if self.speeds else None

    @property
    def time_to_target_s(self) -> float | None:
        """The mean; None if a seed never reached it, or nothing was timed."""
        known = [one for one in self.times_to_target_s if one is not None]
        return mean(known) if known and len(known) == len(self.times_to_target_s) else None

    @property
    def num_reached(self) -> int:
        return sum(one is not None for one in self.epochs_to_target)

    @property
    def is_reached_by_all(self) -> bool:
        return bool(self.epochs_to_target) and self.num_reached == len(self.epochs_to_target)

    @property
    def idle_s(self) -> float | None:
        return None if self.idle_s_by_cause is None else sum(self.idle_s_by_cause.values())


def summarise_group(group: Group) -> dict[str, ModeSummary]:
    """Every mode of a group, in the order it is shown in."""
    return {mode: _summary(group, mode) for mode in group.by_mode}


def ideal_samples_per_s(group: Group) -> float | None:
    """The sum of the solos; None if one is missing."""
    if not all(group.timed(solo) for solo in group.solos):
        return None
    return sum(mean(speeds_of(group.timed(solo))) for solo in group.solos)


def seconds_per_epoch(runs: Sequence[SuiteRun]) -> float | None:
    """The median over the timed ones among the runs, warm-up excluded; None if none is."""
    seconds = [epoch.seconds for run in runs if run.case.is_timed for epoch in after_warm_up(run.epochs)]
    return median(seconds) if seconds else None


def speeds_of(runs: Sequence[SuiteRun]) -> list[float]:
    return [samples_per_s(run.epochs) for run in runs]


def _summary(group: Group, mode: str) -> ModeSummary:
    judged, runs = group.judged(mode), group.timed(mode)
    speed = _mean_speed(group, mode)
    return ModeSummary(
        mode=mode,
        seeds=tuple(run.case.seed for run in judged),
        epochs=(judged or runs)[0].case.epochs,
        evals=tuple(run.epochs[-1].eval for run in judged if run.epochs[-1].eval is not None),
        speeds=tuple(speeds_of(runs)),
        efficiency=_ratio(speed, ideal_samples_per_s(group)),
        efficiency_ci95=_efficiency_interval(group, mode),
        of_ceiling=_ratio(speed, _mean_speed(group, INDEPENDENT)),
        speedup=_ratio(speed, _mean_speed(group, SOLO)),
        epochs_to_target=tuple(_epochs_to_target(run) for run in judged),
        times_to_target_s=tuple(_time_to_target_s(run, seconds_per_epoch(runs)) for run in judged),
        averages=_mean_known(runs, lambda run: float(sum(epoch.averages for epoch in run.epochs))),
        average_ms=_mean_known(runs, lambda run: _measured(run).average_ms),
        exposed_average_fraction=_mean_known(runs, lambda run: mean_over_time(run.epochs, "exposed_average_fraction")),
        wait_fraction=_mean_known(runs, lambda run: mean_over_time(run.epochs, "wait_fraction")),
        idle_s_by_cause=_by_cause([_measured(run).idle_s_by_rank for run in runs]),
        sampled_idle_s_by_cause=_by_cause([_measured(run).sampled_idle_s_by_rank for run in runs]),
        share_by_rank=_shares(runs),
        anchors=tuple(_measured(run).anchors for run in runs),
        # Memory does not depend on other runs, so untimed runs count too.
        peak_memory_bytes_by_rank=_peak_memory(runs or judged),
    )


def _measured(run: SuiteRun) -> SuiteMeasurement:
    return run.measured or SuiteMeasurement()


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if reference and value is not None else None


def _mean_speed(group: Group, mode: str) -> float | None:
    runs = group.timed(mode)
    return mean(speeds_of(runs)) if runs else None


def efficiencies_by_round(group: Group, mode: str) -> list[float]:
    """One value per seed for which the mode and all solos were timed, because a round has similar noise."""
    speeds = [{run.case.seed: samples_per_s(run.epochs) for run in group.timed(one)} for one in (mode, *group.solos)]
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in speeds)))
    return [speeds[0][seed] / sum(solo[seed] for solo in speeds[1:]) for seed in seeds]


def _efficiency_interval(group: Group, mode: str) -> Interval | None:
    rounds = efficiencies_by_round(group, mode)
    if len(rounds) != 1:
        return student_interval(rounds)
    samples = [
        [epoch.samples / epoch.seconds for run in group.timed(one) for epoch in after_warm_up(run.epochs)]
        for one in (mode, *group.solos)
    ]
    return bootstrap_interval(samples, lambda drawn: mean(drawn[0]) / sum(mean(solo) for solo in drawn[1:]))


def _epochs_to_target(run: SuiteRun) -> int | None:
    subject = run.subject
    return epochs_to_target(run.epochs, subject.target, larger_is_better=subject.larger_is_better)


def _time_to_target_s(run: SuiteRun, epoch_s: float | None) -> float | None:
    """As it was measured; of an untimed run its epochs, each as long as the timed runs' epochs."""
    subject = run.subject
    if run.case.is_timed:
        return time_to_target_s(run.epochs, subject.target, larger_is_better=subject.larger_is_better)
    num_epochs = _epochs_to_target(run)
    return None if num_epochs is None or epoch_s is None else num_epochs * epoch_s


def _mean_known(runs: Sequence[SuiteRun], value_of: Callable[[SuiteRun], float | None]) -> float | None:
    known = [value for run in runs if (value := value_of(run)) is not None]
    return mean(known) if known else None


def _by_cause(seconds_of_runs: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, float] | None:
    """Sums over the ranks, mean over the runs that know them; None if none does."""
    told = [by_rank for by_rank in seconds_of_runs if by_rank]
    if not told:
        return None
    sums: dict[str, float] = defaultdict(float)
    for by_rank in told:
        for waits in by_rank:
            for cause, seconds in waits.items():
                sums[cause] += seconds / len(told)
    return dict(sums)


def _shares(runs: Sequence[SuiteRun]) -> tuple[float, ...]:
    """Each rank's part of the samples, warm-up excluded."""
    rows = [epoch.share_by_rank for run in runs for epoch in after_warm_up(run.epochs)]
    return tuple(mean(column) for column in zip(*rows, strict=True))


def _peak_memory(runs: Sequence[SuiteRun]) -> tuple[int | None, ...]:
    rows = [run.epochs[-1].peak_memory_bytes_by_rank for run in runs if run.epochs[-1].peak_memory_bytes_by_rank]
    return tuple(max((one for one in column if one is not None), default=None) for column in zip(*rows, strict=False))


def document(groups: Sequence[Group]) -> dict[str, Any]:
    """Per model and mode, for programs."""
    return {group.name: _group_document(group) for group in groups}


def _group_document(group: Group) -> dict[str, Any]:
    subject = group.subject
    return {
        "data": group.case.data_name,
        "is_stand_in": subject.is_stand_in,
        "metric": subject.metric,
        "larger_is_better": subject.larger_is_better,
        "target": subject.target,
        "devices": list(group.case.devices),
        "timed_epochs": group.timed_epochs,
        "ideal_samples_per_s": _rounded(ideal_samples_per_s(group), 1),
        "modes": {mode: _mode_document(summary) for mode, summary in summarise_group(group).items()},
        "incomplete": [f"{run.case.mode} seed {run.case.seed}" for run in group.incomplete],
    }


def _mode_document(summary: ModeSummary) -> dict[str, Any]:
    causes = summary.idle_s_by_cause
    return {
        "eval": {
            "mean": _rounded(summary.eval, 6),
            "ci95": _pair(summary.eval_ci95, 6),
            "values": [round(value, 6) for value in summary.evals],
        },
        "samples_per_s": _rounded(summary.samples_per_s, 1),
        "efficiency": _rounded(summary.efficiency, 4),
        "efficiency_ci95": _pair(summary.efficiency_ci95, 4),
        "speedup": _rounded(summary.speedup, 4),
        "time_to_target_s": _rounded(summary.time_to_target_s, 3),
        "epochs_to_target": list(summary.epochs_to_target),
        "target_reached": summary.num_reached,
        "averages": _rounded(summary.averages, 1),
        "average_ms": _rounded(summary.average_ms, 4),
        "exposed_average_fraction": _rounded(summary.exposed_average_fraction, 6),
        "idle_s": _rounded(summary.idle_s, 3),
        "idle_s_by_cause": None if causes is None else {cause: round(seconds, 3) for cause, seconds in causes.items()},
        "epochs": summary.epochs,
        "seeds": list(summary.seeds),
        "num_timed": len(summary.speeds),
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _pair(interval: Interval | None, digits: int) -> list[float] | None:
    return None if interval is None else [round(interval.low, digits), round(interval.high, digits)]
