"""The process that owns one MPS daemon: starts it, waits until the starter closes the pipe, and ends the daemon.

A separate program, so that the daemon ends even if its starter was killed; uses the standard library and psutil only.
Run by `slices.mps` as a file: mps_process.py CONTROL FOLDER
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

# How long the daemon may take to start, to answer a command, and to end.
START_S = 20.0
ASK_S = 10.0
QUIT_S = 15.0
_TURN_S = 0.05
_NUM_LOG_LINES = 10
_PR_SET_CHILD_SUBREAPER = 36


def main(control: str, folder: Path) -> None:
    """Report on stdout, in one line of JSON, whether the daemon runs; end it when stdin is closed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # The daemon detaches itself; as a subreaper this process adopts its processes and can wait for their end.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        trouble = start(control, folder)
        print(
            json.dumps({"trouble": trouble, "log": None if trouble is None else log_tail(folder / "log")}), flush=True
        )
        if trouble is None:
            sys.stdin.read()
    finally:
        ask(control, "quit")
        end_children(time.monotonic() + QUIT_S)
        shutil.rmtree(folder, ignore_errors=True)


def start(control: str, folder: Path) -> str | None:
    """Start the daemon; returns the problem if it does not answer in time."""
    # Into a file: the daemon keeps its output open, so a pipe would never reach its end.
    with open(folder / "log" / "start.log", "wb") as log:
        starter = subprocess.Popen([control, "-d"], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            if starter.poll():
                return f"ended with exit code {starter.returncode}"
            if starter.returncode == 0 and ask(control, "get_server_list"):
                return None
            time.sleep(_TURN_S)
    starter.kill()
    return f"did not answer within {START_S:g} s"


def ask(control: str, command: str) -> bool:
    """Whether the daemon accepted the command."""
    try:
        ended = subprocess.run([control], input=f"{command}\n".encode(), capture_output=True, timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0


def end_children(deadline_s: float) -> None:
    """Wait for the end of the daemon and its servers; after the deadline they are killed."""
    while _reap():
        if time.monotonic() > deadline_s:
            for process in psutil.Process().children(recursive=True):
                process.kill()
        time.sleep(_TURN_S)


def _reap() -> bool:
    """Reap the children that have ended; returns whether others are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def log_tail(folder: Path) -> str:
    """The last lines of the logs of the daemon and its servers."""
    logs = [folder / f"{name}.log" for name in ("start", "control", "server")]
    lines = [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()]
    return "\n".join(lines[-_NUM_LOG_LINES:])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
