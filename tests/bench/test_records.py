"""The script that puts the records of many runs into one small file, and back."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from outrider.bench.datasets.source import DataSource
from outrider.bench.report.charts import learning_figures
from outrider.bench.report.markdown import make_report, markdown
from outrider.bench.suite.groups import group_runs
from outrider.bench.suite.run_case import run_case
from outrider.bench.suite.runs import EpochRow, SuiteMeasurement, case_from_json, read_runs, subject_from_json
from outrider.bench.suite.suite_plan import SuiteRequest, plan
from outrider.bench.suite.sweep import run_sweep
from outrider.machine.devices import parse_devices

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "records.py"
CASE = {
    "model": "mlp",
    "seed": 0,
    "epochs": 2,
    "batch_size": 64,
    "devices": ["cpu", "cpu@0.4"],
    "data_name": "MNIST",
    "max_samples": None,
    "settings": {"precision": "bf16"},
    "is_timed": False,
}
SUBJECT = {"metric": "accuracy", "larger_is_better": True, "is_stand_in": False, "target": None, "published": None}


def write_record(folder: Path, *, mode: str, status: str = "finished", torch: str = "2.13.0") -> None:
    epoch = {
        "epoch": 0,
        "eval": 0.912345678,
        "loss": 0.25,
        "seconds": 2.0,
        "train_s": 2.0,
        "wall_s": 2.5,
        "share_by_rank": [0.75, 0.25],
        "averages": 3,
        "anchor": None,
        "exposed_average_fraction": 0.0,
        "wait_fraction": 0.0,
        "peak_memory_bytes_by_rank": [1, 2],
        "logged": {},
    }
    record: dict[str, Any] = {
        "schema_version": 1,
        "environment": {"torch": torch},
        "status": status,
        "started_at": "2026-11-15T16:00:00+00:00",
        "options": {"policy": mode},
        "epochs": [epoch, epoch | {"epoch": 1, "train_s": 4.0}],
        "totals": {"samples": 200, "eval": 0.912345678},
        "benchmark": {
            "case": CASE | {"mode": mode},
            "subject": SUBJECT,
            "measured": {"idle_s_by_rank": [{"average": 0.5, "rest": 0.0}, {"average": 0.0}], "anchors": []},
        },
    }
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(record))


def run(runs: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), str(runs), str(target)], capture_output=True, text=True)


def test_finished_runs_become_lines_without_what_is_not_known(tmp_path: Path) -> None:
    write_record(tmp_path / "runs" / "a", mode="cpu-async")
    write_record(tmp_path / "runs" / "b", mode="cpu-sync", status="running")
    ended = run(tmp_path / "runs", tmp_path / "all.jsonl")
    assert ended.stdout.startswith("1 of 2 runs, "), ended.stderr
    once, line = map(json.loads, (tmp_path / "all.jsonl").read_text().splitlines())
    assert once == {"schema_version": 1, "environment": {"torch": "2.13.0"}}
    assert line == {
        "started_at": "2026-11-15T16:00:00+00:00",
        "case": {
            "model": "mlp",
            "mode": "cpu-async",
            "seed": 0,
            "epochs": 2,
            "batch_size": 64,
            "devices": ["cpu", "cpu@0.4"],
            "data_name": "MNIST",
            "settings": {"precision": "bf16"},
            "is_timed": False,
        },
        "subject": {"metric": "accuracy", "larger_is_better": True, "is_stand_in": False},
        "epochs": {
            "eval": {"always": 0.912346},
            "loss": {"always": 0.25},
            "seconds": {"always": 2.0},
            "train_s": [2.0, 4.0],
            "wall_s": {"always": 2.5},
            "share_by_rank": {"always": [0.75, 0.25]},
            "averages": {"always": 3},
            "exposed_average_fraction": {"always": 0.0},
            "wait_fraction": {"always": 0.0},
            "peak_memory_bytes_by_rank": {"always": [1, 2]},
        },
        "totals": {"samples": 200, "eval": 0.912346},
        "measured": {"idle_s_by_rank": [{"average": 0.5, "rest": 0.0}, {"average": 0.0}]},
    }


def test_a_file_becomes_runs_that_a_report_reads(tmp_path: Path) -> None:
    write_record(tmp_path / "runs" / "a", mode="cpu-async")
    write_record(tmp_path / "runs" / "b", mode="cpu-sync")
    run(tmp_path / "runs", tmp_path / "all.jsonl")
    ended = run(tmp_path / "all.jsonl", tmp_path / "again")
    assert ended.stdout == "2 runs\n", ended.stderr
    first, second = read_runs(tmp_path / "again")
    assert (first.case.mode, second.case.mode) == ("cpu-async", "cpu-sync")
    assert first.is_finished
    assert first.case == case_from_json(CASE | {"mode": "cpu-async"})
    assert first.subject == subject_from_json(SUBJECT)
    assert [epoch.epoch for epoch in first.epochs] == [0, 1]
    assert first.epochs[1] == EpochRow(
        epoch=1,
        samples=100,
        seconds=2.0,
        train_s=4.0,
        wall_s=2.5,
        loss=0.25,
        eval=0.912346,
        share_by_rank=(0.75, 0.25),
        averages=3,
        anchor=None,
        drift=None,
        exposed_average_fraction=0.0,
        wait_fraction=0.0,
        peak_memory_bytes_by_rank=(1, 2),
    )
    assert first.measured == SuiteMeasurement(idle_s_by_rank=({"average": 0.5, "rest": 0.0}, {"average": 0.0}))
    assert run(tmp_path / "again", tmp_path / "twice.jsonl").returncode == 0
    once, twice = ((tmp_path / name).read_text().splitlines() for name in ("all.jsonl", "twice.jsonl"))
    assert list(map(json.loads, twice)) == list(map(json.loads, once))


def test_anchors_and_ms_per_average_are_kept(tmp_path: Path) -> None:
    write_record(tmp_path / "runs" / "a", mode="cpu-cadence")
    path = tmp_path / "runs" / "a" / "record.json"
    record = json.loads(path.read_text())
    record["benchmark"]["measured"] |= {"average_ms": 1.5, "anchors": [20, 22, 21]}
    path.write_text(json.dumps(record | {"options": {"note": "as its documentation has it"}}))
    run(tmp_path / "runs", tmp_path / "all.jsonl")
    run(tmp_path / "all.jsonl", tmp_path / "again")
    [again] = read_runs(tmp_path / "again")
    assert again.measured is not None
    assert (again.measured.average_ms, again.measured.anchors) == (1.5, (20, 22, 21))
    assert again.note == "as its documentation has it"


def results_of(report: str) -> list[str]:
    """The lines that tell of quality and speed."""
    blocks = [block.split("\n###")[0] for block in report.split("\n### Results\n")[1:]]
    return [line for block in blocks for line in block.splitlines() if line.startswith("| ")]


def test_the_published_mnist_report_can_be_rebuilt_from_its_records(tmp_path: Path) -> None:
    published = SCRIPT.parents[1] / "docs" / "results" / "mnist"
    run(published / "records.jsonl", tmp_path / "runs")
    rebuilt = markdown(make_report(tmp_path / "runs"))
    results = results_of(rebuilt)
    assert len(results) == 4 * 18
    assert results == results_of((published / "report.md").read_text())
    assert "| cpu-sync | 2,345 | 0.94 | 2.8% | 50% / 50% | - |\n" in rebuilt
    assert "| accelerate-local-sgd | 295 | 20.31 | 7.1% | 50% / 50% | - |\n" in rebuilt


@pytest.mark.parametrize("names", [("timing",), ("accuracy", "timing")])
def test_curves_of_published_records_go_on_in_time(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        run(SCRIPT.parents[1] / "docs" / "results" / "resnet20" / f"{name}.jsonl", tmp_path / "runs")
    figures = [one for group in group_runs(read_runs(tmp_path / "runs")) for one in learning_figures(group)]
    curves = [line["x"] for figure in figures for line in figure["data"]]
    assert len(curves) >= 26
    assert all(x[0] > 0 and all(a < b for a, b in itertools.pairwise(x)) for x in curves)


def test_without_wall_times_all_curves_are_drawn_against_training_time(tmp_path: Path) -> None:
    run(SCRIPT.parents[1] / "docs" / "results" / "resnet20" / "timing.jsonl", tmp_path / "runs")
    first, *_ = group_runs(read_runs(tmp_path / "runs"))
    layout = learning_figures(first)[1]["layout"]
    assert layout["title"]["text"] == "Evaluation (accuracy) against training time"
    assert layout["xaxis"]["title"]["text"] == "s, start-up and evaluation excluded"


@pytest.mark.slow
def test_a_sweep_goes_on_from_records(tmp_path: Path, make_log: Callable[[], Any]) -> None:
    data = DataSource(may_download=False, max_samples=64)
    request = SuiteRequest(
        models=("logistic",),
        modes=("solo-0", "cpu-sync"),
        devices=parse_devices("cpu,cpu@0.5"),
        data=data,
        epochs=2,
        batch_size=16,
        settings={"timeout_s": 60.0},
    )
    trained = plan(request)[0]
    run_case(trained, tmp_path / "runs" / trained.case.folder)
    run(tmp_path / "runs", tmp_path / "all.jsonl")
    run(tmp_path / "all.jsonl", tmp_path / "again")
    log = make_log()
    swept = run_sweep(plan(request), output=tmp_path / "again", watcher=log)
    told = [line for line in log.lines if line.startswith(("skipped", "begin", "failed"))]
    assert told == ["skipped solo-0 0", "begin cpu-sync 0"]
    assert len(swept.runs) == 2


@pytest.mark.parametrize("name", ["resnet20/accuracy", "resnet20/timing", "six_models/records", "mnist/records"])
def test_published_records_can_be_reported_on(name: str, tmp_path: Path) -> None:
    published = SCRIPT.parents[1] / "docs" / "results" / f"{name}.jsonl"
    assert run(published, tmp_path / "runs").returncode == 0
    runs = read_runs(tmp_path / "runs")
    assert len(runs) == len(published.read_text().splitlines()) - 1
    assert all(one.is_finished for one in runs)
    assert {one.case.is_timed for one in runs} == {name in ("resnet20/timing", "mnist/records")}


def test_published_records_can_be_drawn(tmp_path: Path) -> None:
    for name in ("accuracy", "timing"):
        run(SCRIPT.parents[1] / "docs" / "results" / "resnet20" / f"{name}.jsonl", tmp_path / "runs")
    picture = tmp_path / "learning.svg"
    command = [sys.executable, str(SCRIPT.parent / "curves.py"), str(tmp_path / "runs"), str(picture)]
    ended = subprocess.run([*command, "--modes", "solo-0,nccl-async"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    lines = [part for part in ElementTree.parse(picture).iter() if part.get("clip-path")]
    assert [line.get("d", "").count("L") for line in lines] == [199, 199]
    assert ">91.0%<" in picture.read_text()


def test_runs_of_different_machines_are_not_put_into_one_file(tmp_path: Path) -> None:
    write_record(tmp_path / "runs" / "a", mode="cpu-async")
    write_record(tmp_path / "runs" / "b", mode="cpu-sync", torch="2.11.0")
    ended = run(tmp_path / "runs", tmp_path / "all.jsonl")
    assert ended.returncode != 0
    assert "['environment'] differ" in ended.stderr
