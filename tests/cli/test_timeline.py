"""`outrider timeline`: a summary within 80 columns, files by name, and errors with a way out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.timeline import EPILOG, timeline

app = typer.Typer()
app.command(epilog=EPILOG)(timeline)
NO_TORCH = """
import sys
from outrider.cli.main import app
app(["timeline", sys.argv[1], "--export", "csv,perfetto"], standalone_mode=False)
heavy = {"torch", "numpy", "jinja2", "plotly"} & set(sys.modules)
sys.exit(f"loaded for a table: {heavy}" if heavy else 0)
"""


def wait(rank: int, t: float) -> dict[str, Any]:
    waits_ms = {"startup": 0.0, "epoch boundary": 0.0, "average": 250.0, "rest": 0.0, "data": 10.0, "evaluation": 0.0}
    return {"t": t, "rank": rank, "kind": "epoch end", "epoch": 0, "loss": 0.5, "eval": None, "waits_ms": waits_ms}


def events_of(rank: int, device: str, batches: int) -> list[dict[str, Any]]:
    return [
        {"t": 1.0, "rank": rank, "kind": "ready", "device": device},
        {"t": 2.0, "rank": rank, "kind": "epoch start", "epoch": 0},
        {"t": 4.0, "rank": rank, "kind": "window", "window": 0, "start": 2.0, "batches": batches,
         "samples": 64 * batches, "compute_ms": 2000.0},
        {"t": 4.0, "rank": rank, "kind": "average start", "window": 0},
        {"t": 4.1, "rank": rank, "kind": "average end", "window": 0, "ms": 100.0, "drift": 0.01},
        wait(rank, 5.0),
    ]  # fmt: skip


def plan(t: float, anchor: int) -> dict[str, Any]:
    reason = f"rank 1 sets the pace by paces, rounding wastes {anchor}.0%, and so on and so forth"
    return {"t": t, "rank": 0, "kind": "plan", "value": [9, 3], "reason": reason, "anchor": anchor}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rank 1 idle for the second before its only epoch."""
    path = tmp_path / "20250101-120000-cadence"
    path.mkdir()
    times_s = [i / 10 for i in range(1, 51)]
    percents = [[90.0] * 50, [0.0 if 1.0 < t <= 2.0 else 40.0 for t in times_s]]
    devices = [
        {"rank": r, "device": "cpu", "source": "psutil", "percent": percent} for r, percent in enumerate(percents)
    ]
    document = {
        "schema_version": 1,
        "utilization": {"period_ms": 100, "t": times_s, "devices": devices},
        "events": events_of(0, "cpu", 9) + events_of(1, "cpu@0.4", 3) + [plan(2.0 + i / 10, 20 + i) for i in range(13)],
    }
    (path / "timeline.json").write_text(json.dumps(document))
    (path / "record.json").write_text('{"policy": "cadence", "status": "finished", "epochs": [{}]}')
    return path


def output_of(folder: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, [str(folder), *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_summary_fits_80_columns(folder: Path) -> None:
    assert max(map(len, output_of(folder).splitlines())) <= 80


def test_the_summary_says_what_ran(folder: Path) -> None:
    expected = "20250101-120000-cadence: policy cadence, 2 ranks, 1 epoch, 5.0 s, finished"
    assert output_of(folder).splitlines()[0] == expected


def test_the_summary_has_a_line_per_rank(folder: Path) -> None:
    lines = [" ".join(line.split()) for line in output_of(folder).splitlines()]
    assert "0 cpu 9 576 75.0% 2.00 - 1 100.0" in lines
    assert "1 cpu@0.4 3 192 25.0% 2.00 - 1 100.0" in lines


def test_recorded_waits_stand_beside_sampled_gaps(folder: Path) -> None:
    lines = [" ".join(line.split()) for line in output_of(folder).splitlines()]
    assert "1 recorded 0.00 0.00 0.25 0.00 0.01 0.00 -" in lines
    assert "1 sampled 1.00 0.00 0.00 0.00 0.00 0.00 0.00" in lines


def test_the_anchor_history_is_cut_after_ten_lines(folder: Path) -> None:
    shown = output_of(folder)
    assert "anchor: 32 at the end, 20 to 32, 12 changes" in shown
    assert "and 3 more changes" in shown


def test_gaps_are_listed_with_their_cause(folder: Path) -> None:
    assert "idle gaps: 1\n     1.00 s  rank 1 idle for 1.00 s: startup\n" in output_of(folder)


def test_a_run_that_was_not_sampled_says_so(folder: Path) -> None:
    document = json.loads((folder / "timeline.json").read_text())
    (folder / "timeline.json").write_text(json.dumps({**document, "utilization": None}))
    assert "idle gaps: utilization was not sampled in this run" in output_of(folder)


def test_export_prints_the_files_it_wrote(folder: Path) -> None:
    assert output_of(folder, "--export", "csv,perfetto") == f"{folder / 'timeline.csv'}\n{folder / 'trace.json'}\n"
    assert (folder / "trace.json").is_file()


def test_an_unknown_format_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(tmp_path), "--export", "perfeto"])
    assert str(result.exception) == (
        "unknown format 'perfeto'\nhint: did you mean perfetto? formats are json, csv, html, perfetto"
    )


def test_a_missing_folder_is_an_error_and_exit_code_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outrider", "timeline", str(tmp_path / "none")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[0] == f"error: no folder {tmp_path / 'none'}"


def test_tables_need_neither_torch_nor_plotly(folder: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", NO_TORCH, str(folder)], capture_output=True, text=True, timeout=60)
    assert ended.stderr == ""
    assert ended.returncode == 0
