"""Reads the cells of learning_study.py: what a sample was worth in each, and how well the formula predicts it.

The worth of a sample is the number of batches with which one device alone reaches a loss, divided by the number of
batches with which all ranks together reached it. Exact shared steps have 1 by construction.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

from outrider.policy.sample_worth import sample_worth

SPEEDS = {"pair0.4": (1.0, 0.4), "pair0.8": (1.0, 0.8), "trio": (1.0, 0.5, 0.25), "quad": (1.0,) * 4}
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57}
"""Student's t for a 95 % interval of a mean, by number of values; 2 for more."""
CHOICE = (0, 1, 2)


@dataclass(frozen=True, kw_only=True)
class CellResult:
    task: str
    speeds: str
    window: int
    remedy: str
    rate: float
    length: float
    seed: int
    averages: int
    points: tuple[tuple[float, float], ...]

    @property
    def is_alone(self) -> bool:
        return self.speeds == "solo" and self.remedy == "plain"


@dataclass(frozen=True, kw_only=True)
class Worth:
    """Of one evaluation of a cell; `progress` is the part of the run that was over."""

    cell: CellResult
    progress: float
    worth: float

    @property
    def ranks(self) -> float:
        speeds = SPEEDS[self.cell.speeds]
        return sum(speeds) ** 2 / sum(speed**2 for speed in speeds)

    @property
    def recovered(self) -> float:
        """The part of what averaging could cost at most, 1 - 1/ranks, that it did not cost."""
        return (self.worth - 1 / self.ranks) / (1 - 1 / self.ranks)


def read_cells(path: Path) -> list[CellResult]:
    cells = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        task, speeds, window, remedy, rate, length, seed = row["key"].split("|")
        cells.append(
            CellResult(
                task=task,
                speeds=speeds,
                window=int(window),
                remedy=remedy,
                rate=float(rate),
                length=float(length),
                seed=int(seed),
                averages=row.get("averages", 0),
                points=tuple((batches, math.inf if loss is None else loss) for batches, loss in row["points"]),
            )
        )
    return cells


class AloneCurve:
    """The loss of one device alone by batches: a falling curve through the means of all seeds, times a factor per seed.

    Seeds differ by more than the policies do, since initial weights and the order of the data differ. A run is
    therefore compared with the run alone of its own seed, in shape with all of them.
    """

    def __init__(self, points: Iterable[tuple[int, float, float]]) -> None:
        by_batches = defaultdict(dict)
        for seed, batches, loss in points:
            by_batches[batches][seed] = loss
        self.batches = sorted(by_batches)
        means = {batches: fmean(by_seed.values()) for batches, by_seed in by_batches.items()}
        self.losses = falling([means[batches] for batches in self.batches])
        late = self.batches[len(self.batches) // 4 :]
        self.factors = {
            seed: math.exp(fmean(math.log(by_batches[b][seed] / means[b]) for b in late))
            for seed in by_batches[self.batches[-1]]
        }

    def batches_to(self, loss: float) -> float | None:
        """By interpolation in the logarithm of batches; None before the first and after the last point."""
        if not self.losses or loss > self.losses[0] or loss <= self.losses[-1]:
            return None
        after = next(number for number, reached in enumerate(self.losses) if reached < loss)
        high, low = self.losses[after - 1], self.losses[after]
        part = (high - loss) / (high - low)
        return math.exp((1 - part) * math.log(self.batches[after - 1]) + part * math.log(self.batches[after]))


def falling(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never rises (pool adjacent violators)."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value, 1])
        while len(pools) > 1 and pools[-1][0] > pools[-2][0]:
            (last, count), (before, others) = pools.pop(), pools.pop()
            pools.append([(last * count + before * others) / (count + others), count + others])
    return [mean for mean, count in pools for _ in range(int(count))]


def alone_curves(cells: Sequence[CellResult]) -> dict[tuple[str, float], AloneCurve]:
    """By task and rate: of flat schedules the points of the longest run, of others the ends of runs of each length."""
    groups = defaultdict(list)
    for cell in cells:
        if cell.is_alone and cell.points:
            groups[cell.task, cell.rate].append(cell)
    curves = {}
    for key, group in groups.items():
        is_scheduled = len({cell.length for cell in group}) > 1
        curves[key] = AloneCurve(
            (cell.seed, *point) for cell in group for point in (cell.points[-1:] if is_scheduled else cell.points)
        )
    return curves


def worths(cells: Sequence[CellResult]) -> list[Worth]:
    curves = alone_curves(cells)
    lengths = defaultdict(set)
    for cell in cells:
        if cell.is_alone:
            lengths[cell.task].add(cell.length)
    found = []
    for cell in cells:
        curve = curves.get((cell.task, cell.rate))
        if cell.is_alone or curve is None or not cell.points:
            continue
        is_scheduled = len(lengths[cell.task]) > 1
        for batches, measured in cell.points[-1:] if is_scheduled else cell.points:
            loss = measured / curve.factors[cell.seed]
            alone = curve.batches_to(loss)
            if alone is None:
                last = curve.losses[-1] if curve.losses else math.inf
                alone = curve.batches[-1] if loss <= last else curve.batches[0]
            found.append(Worth(cell=cell, progress=batches / cell.points[-1][0], worth=alone / batches))
    return found


def interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f} (n = 1)" if values else "–"
    half = T_95.get(len(values), 2.0) * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):.2f} ± {half:.2f}"


def table(rows: Sequence[Worth], row_key: str, column_key: str) -> str:
    """Means with their intervals, as a table of Markdown."""
    groups = defaultdict(list)
    for row in rows:
        groups[_field(row, row_key), _field(row, column_key)].append(row.worth)
    columns = sorted({column for _, column in groups})
    lines = [f"| {row_key} | " + " | ".join(str(column) for column in columns) + " |"]
    lines.append("| --- " * (len(columns) + 1) + "|")
    for name in sorted({name for name, _ in groups}):
        lines.append(f"| {name} | " + " | ".join(interval(groups.get((name, c), [])) for c in columns) + " |")
    return "\n".join(lines)


def _field(row: Worth, name: str) -> object:
    return round(row.progress, 1) if name == "progress" else getattr(row.cell, name)


def report(rows: Sequence[Worth]) -> None:
    ends = [row for row in rows if row.progress > 0.99]
    plain = [row for row in ends if row.cell.remedy == "plain"]
    for speeds in SPEEDS:
        chosen = [row for row in plain if row.cell.speeds == speeds]
        for rate in sorted({row.cell.rate for row in chosen}):
            print(f"\n{speeds}, rate × {rate:g}, at the end: 1/ranks = {1 / chosen[0].ranks:.2f}\n")
            print(table([row for row in chosen if row.cell.rate == rate], "task", "window"))
    phases = [row for row in rows if row.cell.remedy == "plain" and row.cell.speeds == "pair0.4" and row.cell.rate == 1]
    for task in sorted({row.cell.task for row in phases}):
        chosen = [row for row in phases if row.cell.task == task]
        if len({row.progress for row in chosen}) > 1:
            print(f"\n{task}, pair0.4, by the part of the run that is over\n")
            print(table(chosen, "progress", "window"))
    for window in sorted({row.cell.window for row in ends if row.cell.remedy != "plain"}):
        chosen = [
            r for r in ends if r.cell.window == window and r.cell.speeds in ("pair0.4", "solo") and r.cell.rate == 1
        ]
        print(f"\nremedies, window {window}, pair0.4, at the end (window 0: sums applied late)\n")
        print(table(chosen, "remedy", "task"))


@dataclass(frozen=True, kw_only=True)
class Line:
    """recovered = at_one_step - per_fold * ln(window)"""

    at_one_step: float
    per_fold: float


def fit_by_task(rows: Sequence[Worth]) -> dict[tuple[str, float], Line]:
    """Least squares for each task and rate, over all windows of the pair of speeds 1 and 0.4."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.cell.task, row.cell.rate].append((math.log(row.cell.window), row.recovered))
    lines = {}
    for key, points in groups.items():
        if len({x for x, _ in points}) > 1:
            middle, height = fmean(x for x, _ in points), fmean(y for _, y in points)
            slope = sum((x - middle) * (y - height) for x, y in points) / sum((x - middle) ** 2 for x, _ in points)
            lines[key] = Line(at_one_step=height - slope * middle, per_fold=-slope)
    return lines


def print_fit(rows: Sequence[Worth]) -> None:
    lines = fit_by_task([row for row in rows if row.cell.speeds == "pair0.4" and row.cell.seed in CHOICE])
    print("\n| task | rate | part recovered at windows of 1 step | less per fold |\n| --- | --- | --- | --- |")
    for (task, rate), line in sorted(lines.items()):
        print(f"| {task} | × {rate:g} | {line.at_one_step:.2f} | {line.per_fold:+.3f} |")
    if lines:
        print("median", median(x.at_one_step for x in lines.values()), median(x.per_fold for x in lines.values()))


def print_errors(rows: Sequence[Worth], title: str) -> None:
    """How well the formula in the package predicts the means of cells over their seeds."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.cell.task, row.cell.speeds, row.cell.window, row.cell.rate].append(row)
    errors = [
        (sample_worth(group[0].cell.window, ranks=group[0].ranks) - fmean(row.worth for row in group), key)
        for key, group in groups.items()
    ]
    if not errors:
        return
    size = math.sqrt(fmean(error**2 for error, _ in errors))
    high = [error for error, _ in errors if error > 0.05]
    print(f"\n{title}: {len(errors)} cells, formula minus measured {fmean(e for e, _ in errors):+.3f} in the mean,")
    print(f"{size:.3f} root mean square; too high by more than 0.05 in {len(high)}; the highest:")
    for error, (task, speeds, window, rate) in sorted(errors, reverse=True)[:3]:
        print(f"  {error:+.2f} {task} {speeds} window {window} rate × {rate:g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", type=Path)
    options = parser.parse_args()
    rows = worths(read_cells(options.cells))
    report(rows)
    plain = [row for row in rows if row.cell.remedy == "plain" and row.cell.window and row.progress > 0.99]
    print_fit(plain)
    fitted = [row for row in plain if row.cell.speeds == "pair0.4" and row.cell.seed in CHOICE]
    print_errors(fitted, "cells of the fit")
    print_errors([row for row in plain if row not in fitted and row.cell.speeds == "pair0.4"], "other seeds")
    for speeds in ("pair0.8", "trio", "quad"):
        print_errors([row for row in plain if row.cell.speeds == speeds], speeds)


if __name__ == "__main__":
    main()
