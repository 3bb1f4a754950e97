"""`outrider diagnose`: exit codes, output formats, and where talk and data go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.diagnose import EPILOG, diagnose

FACTS = Path(__file__).parent.parent / "machine" / "facts"
app = typer.Typer()
app.command(epilog=EPILOG)(diagnose)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout


def replay(machine: str, *arguments: str) -> tuple[int, str]:
    return run("--facts", str(FACTS / f"{machine}.json"), *arguments)


@pytest.mark.parametrize(
    ("machine", "exit_code"),
    [
        ("no-gpu", 0),
        ("no-gpu-no-torch-container", 0),
        ("h200", 0),
        ("rtx3090-rtx3060", 0),
        ("v100-a100", 0),
        ("two-amd", 0),
        ("mig-slices", 0),
        ("rtx4080-rtx3070", 1),
        ("rtx5060ti-gtx1060-bare", 1),
        ("rtx5060ti-gtx1060-wsl2", 1),
        ("old-driver", 1),
        ("broken-torch", 1),
        ("unreadable-nvml", 3),
    ],
)
def test_the_exit_code_tells_fine_finding_and_cannot_look(machine: str, exit_code: int) -> None:
    assert replay(machine)[0] == exit_code


def test_json_is_one_document_with_facts_verdicts_and_forecast() -> None:
    _, output = replay("rtx3090-rtx3060", "--json")
    document = json.loads(output)
    assert list(document) == ["schema_version", "exit_code", "facts", "verdicts", "forecast"]
    assert document["forecast"]["advice"] == "train on all with async: about 1.37 × the fastest alone"


def test_json_can_be_replayed(tmp_path: Path) -> None:
    _, output = replay("rtx3090-rtx3060", "--json")
    path = tmp_path / "diagnosis.json"
    path.write_text(output)
    assert run("--facts", str(path), "--json")[1] == output


def test_a_report_is_a_block_for_an_issue() -> None:
    _, output = replay("h200", "--report")
    assert output.startswith("### outrider ")
    assert output.endswith("```\n")


def test_two_formats_at_once_are_a_usage_error() -> None:
    exit_code, output = run("--json", "--report")
    assert (exit_code, output) == (2, "")


def test_facts_that_cannot_be_read_are_a_reason_not_to_look(tmp_path: Path) -> None:
    exit_code, output = run("--facts", str(tmp_path / "nowhere.json"))
    assert (exit_code, output) == (3, "")


def test_colour_is_left_out_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    result = CliRunner().invoke(app, ["--facts", str(FACTS / "old-driver.json")], color=True)
    assert "\x1b[" not in result.stdout


def test_colour_marks_the_level_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    result = CliRunner().invoke(app, ["--facts", str(FACTS / "old-driver.json")], color=True)
    assert "\x1b[31mfailure   \x1b[0mdriver 470.256.02 is too old" in result.stdout


def test_this_machine_is_diagnosed_without_torch_and_talk_goes_to_stderr(tmp_path: Path) -> None:
    # A torch in front of the real one that fails like a build without its libraries.
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open shared object file')\n")
    search = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search, "OUTRIDER_HOME": str(tmp_path)}
    program = "import typer; from outrider.cli.diagnose import diagnose; typer.run(diagnose)"
    ended = subprocess.run(
        [sys.executable, "-c", program, "--json", "--quick"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    document = json.loads(ended.stdout)
    errors = [build["error"] for build in document["facts"]["torches"]]
    assert ended.returncode == document["exit_code"]
    assert "ImportError: libtorch.so: cannot open shared object file" in errors
    assert ended.stderr == "looking at the machine and its torch builds ...\n"
