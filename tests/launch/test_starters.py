"""Programs that start ranks, in processes of their own: however they end, their ranks end with them."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FOREVER_S = 600
RunScript = Callable[..., subprocess.Popen[str]]
WaitUntilGone = Callable[[list[int]], None]
SCRIPT = """
import os, sys, time
from pathlib import Path
from outrider.machine.devices import parse_devices
from outrider.launch.launcher import launch

def work(link):
    link.send("pid", pid=os.getpid())
    time.sleep(float(sys.argv[2]))

ranks = launch(work, {}, devices=parse_devices("cpu,cpu"), log_dir=Path(sys.argv[1]), imports=sys.argv[3:])
print(ranks.next_message().fields["pid"], ranks.next_message().fields["pid"], flush=True)
"""


@pytest.fixture(params=[(), ("wave",)], ids=["fresh", "forked"])
def run_script(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunScript]:
    """Start SCRIPT, a program without a guard around its main part, with some last lines of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(last_lines: str, *, sleep_s: float) -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT + textwrap.dedent(last_lines))
        command = [sys.executable, str(script), str(tmp_path / "logs"), str(sleep_s), *request.param]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def pids_told_by(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(pid) for pid in process.stdout.readline().split()]


def test_a_script_without_a_guard_runs_its_ranks(run_script: RunScript) -> None:
    process = run_script("print(list(ranks.messages())); ranks.raise_error()", sleep_s=0)
    output, complaints = process.communicate(timeout=60)
    assert (process.returncode, output.splitlines()[1:], complaints) == (0, ["[]"], "")


def test_ctrl_c_ends_all_ranks_and_is_raised_again(run_script: RunScript, wait_until_gone: WaitUntilGone) -> None:
    process = run_script("ranks.wait()", sleep_s=FOREVER_S)
    pids = pids_told_by(process)
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=60)
    assert complaints.rstrip().endswith("KeyboardInterrupt")
    assert len(pids) == 2
    wait_until_gone(pids)


def test_a_program_that_ends_without_waiting_ends_its_ranks(
    run_script: RunScript, wait_until_gone: WaitUntilGone
) -> None:
    process = run_script("", sleep_s=FOREVER_S)
    output, complaints = process.communicate(timeout=60)
    assert (process.returncode, complaints) == (0, "")
    wait_until_gone([int(pid) for pid in output.split()])


def test_ranks_do_not_outlive_a_starter_that_was_killed(run_script: RunScript, wait_until_gone: WaitUntilGone) -> None:
    process = run_script("ranks.wait()", sleep_s=FOREVER_S)
    pids = pids_told_by(process)
    process.kill()
    process.wait(timeout=60)
    assert len(pids) == 2
    wait_until_gone(pids)
