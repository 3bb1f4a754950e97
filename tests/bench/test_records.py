"""The script that puts the records of many runs into one small file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "records.py"


def write_record(folder: Path, *, mode: str, status: str = "finished", torch: str = "2.13.0") -> None:
    epoch = {
        "epoch": 0,
        "eval": 0.912345678,
        "loss": 0.25,
        "seconds": 2.0,
        "train_s": 2.0,
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
        "idle": {"waits_s": [{"average": 0.5, "rest": 0.0}, {"average": 0.0}]},
        "benchmark": {"case": {"model": "mlp", "mode": mode, "max_samples": None}},
    }
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(record))


def run(runs: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), str(runs), str(target)], capture_output=True, text=True)


def test_finished_runs_become_lines_without_what_is_nothing(tmp_path: Path) -> None:
    write_record(tmp_path / "runs" / "a", mode="cpu-async")
    write_record(tmp_path / "runs" / "b", mode="cpu-sync", status="running")
    ended = run(tmp_path / "runs", tmp_path / "all.jsonl")
    assert ended.stdout.startswith("1 of 2 runs, "), ended.stderr
    once, line = map(json.loads, (tmp_path / "all.jsonl").read_text().splitlines())
    assert once == {"schema_version": 1, "environment": {"torch": "2.13.0"}}
    assert line == {
        "started_at": "2026-11-15T16:00:00+00:00",
        "case": {"model": "mlp", "mode": "cpu-async"},
        "epochs": {
            "eval": [0.912346, 0.912346],
            "loss": [0.25, 0.25],
            "seconds": [2.0, 2.0],
            "train_s": [2.0, 4.0],
            "share_by_rank": [[0.75, 0.25], [0.75, 0.25]],
            "averages": [3, 3],
            "peak_memory_bytes_by_rank": [[1, 2], [1, 2]],
        },
        "totals": {"samples": 200, "eval": 0.912346},
        "waits_s": [{"average": 0.5}, {}],
    }


def test_runs_of_different_machines_are_not_put_into_one_file(tmp_path: Path) -> None:
    write_record(tmp_path / "runs" / "a", mode="cpu-async")
    write_record(tmp_path / "runs" / "b", mode="cpu-sync", torch="2.11.0")
    ended = run(tmp_path / "runs", tmp_path / "all.jsonl")
    assert ended.returncode != 0
    assert "['environment'] differ" in ended.stderr
