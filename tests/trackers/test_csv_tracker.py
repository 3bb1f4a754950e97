"""The table of values in the run folder: a row per step, also where columns come later or a run is resumed."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from outrider.trackers import CsvTracker, TrackedRun


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    return TrackedRun(name="run", folder=tmp_path)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def logged(run: TrackedRun, *steps: int) -> None:
    tracker = CsvTracker()
    tracker.start(run)
    for step in steps:
        tracker.log({"loss": step / 10}, step)
    tracker.finish("finished")


def test_values_are_rows_of_their_steps(run: TrackedRun) -> None:
    logged(run, 1, 2)
    assert rows(run.folder) == [{"step": "1", "loss": "0.1"}, {"step": "2", "loss": "0.2"}]


def test_a_value_that_comes_later_gets_a_column_and_is_empty_before(run: TrackedRun) -> None:
    tracker = CsvTracker()
    tracker.start(run)
    tracker.log({"loss": 0.5}, 1)
    tracker.log({"loss": 0.25, "logged/top 1, top 5": 0.75}, 2)
    tracker.log({"eval": 3.0}, 3)
    assert rows(run.folder) == [
        {"step": "1", "loss": "0.5", "logged/top 1, top 5": "", "eval": ""},
        {"step": "2", "loss": "0.25", "logged/top 1, top 5": "0.75", "eval": ""},
        {"step": "3", "loss": "", "logged/top 1, top 5": "", "eval": "3.0"},
    ]


def test_a_new_run_does_not_keep_the_rows_of_another(run: TrackedRun) -> None:
    logged(run, 1, 2)
    logged(run, 5)
    assert [row["step"] for row in rows(run.folder)] == ["5"]


def test_a_continued_run_keeps_the_rows_up_to_its_checkpoint(run: TrackedRun, tmp_path: Path) -> None:
    logged(run, 1, 2, 3)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    earlier = {"path": str(tmp_path / "metrics.csv")}
    logged(TrackedRun(name="on", folder=elsewhere, step=2, earlier=earlier), 3, 4)
    assert [row["step"] for row in rows(elsewhere)] == ["1", "2", "3", "4"]
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3"]


def test_a_row_that_a_crash_tore_is_left_out(run: TrackedRun, tmp_path: Path) -> None:
    logged(run, 1, 2)
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes() + b"3")
    logged(TrackedRun(name="on", folder=tmp_path, step=2, earlier={"path": str(path)}), 3)
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3"]
