"""Compares two iteration benchmarks: differences of their settings, and iterations that became slower or faster.

Decides what is compared and when a difference counts. Imports no torch; `diff_report` formats the result. Called by
`outrider bench diff`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from outrider.bench.iteration.iteration_record import IterationFile, ModelTimings, Timing
from outrider.bench.statistics import Groups, RankSum, holm, rank_sum
from outrider.errors import ConfigError, DataError

SCHEMA_VERSION = 1
SIGNIFICANCE = 0.001
"""Below this, over all rows together: runs of one build drift by a few percent, which rounds of one run cannot show."""
PERCENTS = (75, 95)
_NUM_STRETCHES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One percentile of both sides."""

    percent: int
    baseline_s: float
    test_s: float

    @property
    def faster_percent(self) -> float:
        """Positive is faster, as PyTorch has it."""
        return -100 * (self.test_s - self.baseline_s) / self.baseline_s


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffRow:
    """One world of one model on both sides."""

    model: str
    batch_size: int
    baseline: Timing
    test: Timing
    test_of_ranks: RankSum
    p_value: float
    """Of the rank-sum test, corrected for the number of rows."""
    is_comparable: bool = True
    """False if other programs disturbed a side, so that they may have caused the difference."""

    @property
    def label(self) -> str:
        return self.test.label

    @property
    def name(self) -> str:
        return f"{self.model}, {self.label}"

    def change(self, percent: int) -> Change:
        return Change(
            percent=percent, baseline_s=self.baseline.percentile(percent), test_s=self.test.percentile(percent)
        )

    @property
    def is_different(self) -> bool:
        return self.is_comparable and self.p_value < SIGNIFICANCE

    @property
    def verdict(self) -> str:
        """slower, faster, no difference detected or not comparable."""
        if not self.is_different:
            return "no difference detected" if self.p_value >= SIGNIFICANCE else "not comparable"
        return "faster" if self.test_of_ranks.cliffs_delta > 0 else "slower"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A setting of both sides; None if a side does not contain it."""

    name: str
    baseline: Any
    test: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two benchmarks side by side."""

    baseline: str
    test: str
    different_settings: tuple[Setting, ...]
    equal_settings: tuple[Setting, ...]
    rows: tuple[DiffRow, ...]
    warnings: tuple[str, ...]

    def slower_than(self, percent: float) -> list[DiffRow]:
        """Rows that are slower beyond chance, and by more than this at the 75th percentile."""
        return [row for row in self.rows if row.verdict == "slower" and row.change(75).faster_percent < -percent]


def compare(baseline: IterationFile, test: IterationFile) -> Comparison:
    """Match models by name, worlds by their number of ranks."""
    settings = _settings(baseline, test)
    rows = list(_rows(baseline, test))
    if not rows:
        raise _nothing_in_common(baseline, test)
    is_comparable = not (baseline.was_disturbed or test.was_disturbed)
    corrected = holm([row.p_value for row in rows])
    return Comparison(
        baseline=baseline.name,
        test=test.name,
        different_settings=tuple(one for one in settings if one.baseline != one.test),
        equal_settings=tuple(one for one in settings if one.baseline == one.test),
        rows=tuple(
            replace(row, p_value=p, is_comparable=is_comparable) for row, p in zip(rows, corrected, strict=True)
        ),
        warnings=tuple(_warnings(baseline, test, rows)),
    )


def parse_percent(text: str) -> float:
    """`3%` or `3`."""
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < float("inf"):
        raise ConfigError(f"fail-above must be a percentage of 0 or more, got {text!r}", hint="pass --fail-above 3%")
    return percent


def _settings(baseline: IterationFile, test: IterationFile) -> list[Setting]:
    names = [*baseline.settings, *(name for name in test.settings if name not in baseline.settings)]
    return [Setting(name=name, baseline=baseline.settings.get(name), test=test.settings.get(name)) for name in names]


def _rows(baseline: IterationFile, test: IterationFile) -> Iterator[DiffRow]:
    seen = set()
    for mine, theirs in _pairs(baseline, test):
        worlds = {(timing.is_plain, timing.num_ranks): timing for timing in theirs.timings}
        for timing in mine.timings:
            other = worlds.get((timing.is_plain, timing.num_ranks))
            # The run without DDP stands with each of our policies again; once is enough.
            if other is None or (timing.is_plain and timing.measurements in seen):
                continue
            seen.add(timing.measurements)
            yield _row(mine, timing, other)


def _row(model: ModelTimings, baseline: Timing, test: Timing) -> DiffRow:
    tested = rank_sum(*_groups(baseline, test))
    return DiffRow(
        model=model.model,
        batch_size=model.batch_size,
        baseline=baseline,
        test=test,
        test_of_ranks=tested,
        p_value=tested.p_value,
    )


def _groups(baseline: Timing, test: Timing) -> tuple[Groups, Groups]:
    """Rounds of fresh processes if both sides have them, otherwise parts of the one process."""
    mine, theirs = baseline.iterations(), test.iterations()
    if len(mine) > 1 and len(theirs) > 1:
        return mine, theirs
    return _stretches(list(chain(*mine))), _stretches(list(chain(*theirs)))


def _stretches(times: Sequence[float]) -> list[list[float]]:
    """Neighbours in time are alike: at most ten stretches of equal length, whatever is left going to the last."""
    length = max(1, len(times) // _NUM_STRETCHES)
    starts = list(range(0, length * (len(times) // length), length))
    ends = [*starts[1:], len(times)]
    return [list(times[start:end]) for start, end in zip(starts, ends, strict=True)]


def _pairs(baseline: IterationFile, test: IterationFile) -> Iterator[tuple[ModelTimings, ModelTimings]]:
    by_key = {(one.model, one.batch_size): one for one in test.models}
    for one in baseline.models:
        other = by_key.get((one.model, one.batch_size))
        if other is not None:
            yield one, other


def _nothing_in_common(baseline: IterationFile, test: IterationFile) -> DataError:
    return DataError(
        f"nothing to compare: {baseline.name} has {_contents(baseline)}; {test.name} has {_contents(test)}",
        hint="run both with the same --model, --batch-size and number of ranks",
    )


def _contents(file: IterationFile) -> str:
    return "; ".join(
        f"{one.model} (batch {one.batch_size}: {', '.join(timing.label for timing in one.timings)})"
        for one in file.models
    )


# Warnings about settings that change the meaning of a difference.


def _warnings(baseline: IterationFile, test: IterationFile, rows: Sequence[DiffRow]) -> Iterator[str]:
    yield from _machine_warnings(baseline, test)
    for file in (baseline, test):
        if file.was_disturbed:
            share = f"other programs used {file.others_part:.0%} of the processor while {file.name} was made"
            yield f"{share}: no difference is called"
    yield from _model_warnings(baseline, test)
    yield from _count_warnings(rows)
    if any(timing.rounds is None or len(timing.rounds) < 2 for row in rows for timing in (row.baseline, row.test)):
        yield (
            "a side has one round of processes only: what differs from start to start cannot be told "
            "from a change of the build"
        )


def _machine_warnings(baseline: IterationFile, test: IterationFile) -> Iterator[str]:
    unknown = [file.name for file in (baseline, test) if not file.machine]
    if unknown:
        yield f"the machine of {' and of '.join(unknown)} is not known: the difference may be the machine's"
        return
    for name in baseline.machine:
        mine, theirs = baseline.machine[name], test.machine.get(name)
        if mine != theirs:
            yield f"machines differ: {name.replace('_', ' ')} {_said(mine)} against {_said(theirs)}"


def _said(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _model_warnings(baseline: IterationFile, test: IterationFile) -> Iterator[str]:
    for file, other in ((baseline, test), (test, baseline)):
        for one in file.models:
            batches = [two.batch_size for two in other.models if two.model == one.model]
            if not batches:
                yield f"{one.model} is in {file.name} only"
            elif one.batch_size not in batches and file is baseline:
                yield (
                    f"{one.model} has batch size {one.batch_size} against {', '.join(map(str, batches))}: not compared"
                )
    for mine, theirs in _pairs(baseline, test):
        yield from _world_warnings(mine, theirs, baseline.name, test.name)


def _world_warnings(mine: ModelTimings, theirs: ModelTimings, baseline: str, test: str) -> Iterator[str]:
    worlds = [{timing.label for timing in one.timings} for one in (mine, theirs)]
    for one, others, name in ((mine, worlds[1], baseline), (theirs, worlds[0], test)):
        for timing in one.timings:
            if timing.label not in others:
                yield f"{one.model}, {timing.label} is in {name} only"


def _count_warnings(rows: Sequence[DiffRow]) -> Iterator[str]:
    for row in rows:
        mine, theirs = len(row.baseline.measurements), len(row.test.measurements)
        if mine != theirs:
            yield f"{row.name}: {mine} measurements against {theirs}; the test allows for it, high percentiles do not"
