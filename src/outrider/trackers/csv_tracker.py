"""Values as a table in the run folder: `metrics.csv`, a row per step, a column per name."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from outrider.trackers.tracker import TrackedRun, Tracker

FILE = "metrics.csv"
_STEP = "step"
Row = dict[str, str]


class CsvTracker(Tracker):
    """`metrics.csv` in the run folder; cells of values that are not known are empty."""

    name: ClassVar[str] = "csv"

    def __init__(self) -> None:
        self._path = Path(FILE)
        self._columns: list[str] = []

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        self._path = run.folder / FILE
        rows = [] if run.earlier is None else _read(Path(run.earlier["path"]))
        # What the run did after its checkpoint, it does again.
        kept = [row for row in rows if int(row[_STEP]) <= run.step]
        self._columns = list(kept[0]) if kept else [_STEP]
        self._rewrite(kept)
        return {"path": str(self._path)}

    def log(self, values: Mapping[str, float], step: int) -> None:
        row = {_STEP: str(step), **{name: repr(value) for name, value in values.items()}}
        new = [name for name in row if name not in self._columns]
        if new:
            # Rare: in the first epoch, and where a value is logged for the first time.
            self._columns += new
            self._rewrite([*_read(self._path), row])
            return
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def finish(self, status: str) -> None:
        """Every row is in the file already."""

    def _rewrite(self, rows: list[Row]) -> None:
        """In a second file first: a full disk leaves the rows there are."""
        path = self._path.with_suffix(".csv.new")
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        path.replace(self._path)


def _read(path: Path) -> list[Row]:
    """The whole rows of a file, without one that was torn by a crash."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if None not in row and None not in row.values()]
