"""`outrider replay`: which scripts it runs, what it refuses, and how it ends; test_replaying has the replay itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.api.replay_wish import ReplayWish, refuse_replay

ANSWER = """
import json, os, pathlib, sys
pathlib.Path(json.loads(os.environ["OUTRIDER_REPLAY"])["answer"]).write_text("3")
"""
WAIT = """
import sys, time
try:
    print("waits", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(5)
"""
NOTHING = (
    "error: plain.py ended without calling outrider.train(): nothing was replayed\n"
    "hint: name the script that made the run, with the arguments that make it train\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recorded run, as far as the command looks at it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    program = {"arguments": ["train.py", "--name", "a b"], "folder": str(tmp_path)}
    (tmp_path / "run" / "config.json").write_text(
        json.dumps({"options": {"record_schedule": True}, "program": program})
    )
    return tmp_path


def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider", "replay", *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("text", ["print('hello')", "raise SystemExit(3)"])
def test_a_script_that_does_not_train_is_an_error(folder: Path, text: str) -> None:
    (folder / "plain.py").write_text(text)
    told = replay("run", "plain.py")
    assert (told.returncode, told.stderr) == (1, NOTHING)


def test_a_script_that_fails_ends_with_its_own_exit_code(folder: Path) -> None:
    (folder / "plain.py").write_text("raise SystemExit(7)")
    assert replay("run", "plain.py").returncode == 7


def test_the_exit_code_is_that_of_the_replay_even_if_the_script_goes_on(folder: Path) -> None:
    (folder / "plain.py").write_text(ANSWER)
    assert replay("run", "plain.py").returncode == 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 5)])
def test_a_signal_ends_the_script_and_the_command(folder: Path, number: signal.Signals, code: int) -> None:
    (folder / "wait.py").write_text(WAIT)
    command = [sys.executable, "-m", "outrider", "replay", "run", "wait.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waits\n"
        # A terminal sends Ctrl-C to all its processes, everybody else a signal to one.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        assert process.wait(30) == code


def test_arguments_after_the_script_are_its_own(folder: Path) -> None:
    (folder / "plain.py").write_text("import sys; sys.exit(len(sys.argv) + 10)")
    assert replay("run", "plain.py", "--losses", "no/l.csv", "--json").returncode == 14


def test_a_missing_script_is_named(folder: Path) -> None:
    told = replay("run", "missing.py")
    assert (told.returncode, told.stderr) == (
        1,
        "error: there is no script missing.py\nhint: outrider's own options come before it, the script's after it\n",
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no/l.csv", "there is no folder no for the losses\nhint: make it, or write --losses losses.csv"),
        ("run", "run is a folder, not a file for the losses\nhint: write --losses run/losses.csv"),
    ],
)
def test_losses_are_refused_before_the_script_runs(folder: Path, path: str, message: str) -> None:
    (folder / "plain.py").write_text("raise SystemExit(7)")
    told = replay("--losses", path, "run", "plain.py")
    assert (told.returncode, told.stderr) == (1, f"error: {message}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--loses", "x", "run", "s.py"), "error: no such option --loses\nhint: did you mean '--losses'?\n"),
        (("run", "--jsn", "s.py"), "error: no such option --jsn\nhint: did you mean '--json'?\n"),
    ],
)
def test_a_misspelt_option_is_a_usage_error(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    told = replay(*arguments)
    assert (told.returncode, told.stdout, told.stderr) == (2, "", message)


def test_an_option_after_the_run_comes_too_late(folder: Path) -> None:
    told = replay("run", "--yes")
    assert told.returncode == 2
    assert told.stderr == (
        "error: --yes comes too late\nhint: python -m outrider replay --yes ..., then the arguments\n"
    )


def test_the_recorded_program_is_shown_as_a_shell_reads_it(folder: Path) -> None:
    told = replay("run")
    assert told.stderr.splitlines()[0] == f"The run was made in {folder} by: python train.py --name 'a b'"


def test_a_session_ends_with_an_error_and_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = tmp_path / "exit_code"
    for name, value in ReplayWish(run="run", answer=str(answer)).variables().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        refuse_replay()
    assert (ended.value.code, answer.read_text()) == (1, "1")
    assert capsys.readouterr().err.splitlines() == [
        "error: outrider replay found a Session in the script: a loop of your own runs in one process per rank",
        "hint: write its step as a function and call outrider.replay(run, model, optimizer, step, dataset, ...)",
    ]
