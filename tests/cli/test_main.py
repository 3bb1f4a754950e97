"""The command line as a whole: help, version, errors and exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from outrider._version import __version__
from outrider.cli.console import check_torch, error_text, guarded
from outrider.cli.main import app
from outrider.errors import ConfigError, StepError

NO_TORCH = """
import sys
from outrider.cli.main import app
app(["--help"], standalone_mode=False)
heavy = {"torch", "numpy", "rich"} & set(sys.modules)
sys.exit(f"loaded for help: {heavy}" if heavy else 0)
"""


def fail() -> None:
    raise ConfigError("max_anchor must be >= 1, got 0", hint="leave it out")


def test_help_names_every_command_and_an_example() -> None:
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    commands = [line.split()[0] for line in shown.output.split("Commands:\n")[1].splitlines() if line.strip()]
    assert {"demo", "diagnose", "setup", "init", "run", "torch"} <= set(commands)
    assert "Start with: outrider demo" in shown.output


def test_help_loads_neither_torch_nor_rich() -> None:
    ended = subprocess.run([sys.executable, "-c", NO_TORCH], capture_output=True, text=True, timeout=60)
    assert ended.stderr == ""
    assert ended.returncode == 0


def test_help_loads_few_modules() -> None:
    # What it costs to start; seconds would depend on what else the machine does.
    program = "import sys, outrider.cli.main; print(len(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert int(ended.stdout) < 250


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "outrider", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"outrider {__version__}\n", "")


def test_a_wrong_option_is_a_usage_error() -> None:
    shown = CliRunner().invoke(app, ["demo", "--epoch", "3"])
    assert shown.exit_code == 2
    assert "No such option: --epoch" in shown.output


def test_an_error_is_two_lines_on_stderr_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTRIDER_DEBUG", raising=False)
    assert guarded(fail) == 1
    captured = capsys.readouterr()
    assert captured.err == "error: max_anchor must be >= 1, got 0\nhint: leave it out\n"
    assert captured.out == ""


def test_an_error_without_hint_is_one_line_and_shows_no_traceback() -> None:
    error = StepError("rank 1 (cpu), step 7: ValueError: no", traceback="Traceback ...")
    assert error_text(error) == "error: rank 1 (cpu), step 7: ValueError: no"


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_DEBUG", "1")
    with pytest.raises(ConfigError):
        guarded(fail)


def test_a_command_that_ends_well_exits_with_0() -> None:
    assert guarded(lambda: None) == 0


def test_a_missing_torch_is_told_with_the_way_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError) as caught:
        check_torch()
    assert caught.value.message == "torch cannot be imported: import of torch halted; None in sys.modules"
    assert caught.value.hint == "`outrider diagnose` shows why, `outrider setup` installs one that fits"
