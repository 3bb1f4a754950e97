"""`outrider bench diff` from files to its exit code, with and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app

QUICK = [0.100, 0.101, 0.102, 0.103, 0.104, 0.105, 0.106, 0.107, 0.108, 0.109]


def write(path: Path, measurements: list[float]) -> str:
    result = [{"ranks": [0], "measurements": measurements}, {"ranks": [0], "measurements": measurements}]
    entry = {"model": "resnet50", "batch_size": 32, "result": result}
    path.write_text(json.dumps({"bucket_size": 25, "benchmark_results": [entry]}))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [write(tmp_path / "a.json", QUICK), write(tmp_path / "b.json", [1.1 * time_s for time_s in QUICK])]


def test_a_comparison_alone_ends_well(files: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "diff", *files])
    assert result.exit_code == 0
    assert "resnet50, batch size 32" in result.stdout


def test_a_slower_build_ends_with_one_where_a_limit_is_set(files: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "diff", *files, "--fail-above", "3%"])
    assert result.exit_code == 1
    assert "slower by more than 3 %: resnet50, 1 rank, p75 -10.0 %" in result.stderr


def test_the_same_build_ends_well_where_a_limit_is_set(files: list[str]) -> None:
    assert CliRunner().invoke(app, ["bench", "diff", files[0], files[0], "--fail-above", "0%"]).exit_code == 0


def test_a_faster_build_ends_well_where_a_limit_is_set(files: list[str]) -> None:
    assert CliRunner().invoke(app, ["bench", "diff", *reversed(files), "--fail-above", "0%"]).exit_code == 0


def test_json_is_all_that_stdout_has(files: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "diff", *files, "--json"])
    assert [row["verdict"] for row in json.loads(result.stdout)["rows"]] == ["slower", "slower"]


def test_markdown_has_a_table(files: list[str]) -> None:
    assert "### resnet50, batch size 32" in CliRunner().invoke(app, ["bench", "diff", *files, "--markdown"]).stdout


def test_a_page_is_written(files: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "diff", *files, "--html", str(tmp_path / "diff.html")])
    assert result.stderr == f"page: {tmp_path / 'diff.html'}\n"
    assert "baseline" in (tmp_path / "diff.html").read_text()


def test_files_are_compared_where_torch_is_broken(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    command = [sys.executable, "-m", "outrider", "bench", "diff", *files]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={"PYTHONPATH": str(tmp_path)}
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "slower (p < 0.001" in ended.stdout
