"""Runs a program with a time limit and ends it with all its children; used for programs that may hang or crash.

Decides nothing about the answer. Called by detect, probes and install, and by the iteration benchmark.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

_SILENT = "PYTHONWARNINGS"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a child ended; `code` is None if it was stopped for taking too long or could not be started."""

    code: int | None
    stdout: str = ""
    stderr: str = ""
    reason: str | None = None

    @property
    def last_line(self) -> str:
        """The line of stderr that says most, as Python and most tools put it last."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else (self.reason or f"{self._end}, no output")

    @property
    def _end(self) -> str:
        is_signal = self.code is not None and self.code < 0
        return f"ended by {signal.Signals(-(self.code or 0)).name}" if is_signal else f"exit code {self.code}"


def run(command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None) -> Ended:
    """Run to the end or to the time limit, with stdout and stderr kept."""
    try:
        child = start(command, environment=environment)
    except OSError as error:
        return Ended(code=None, reason=f"cannot start {command[0]}: {error.strerror}")
    return finish(child, timeout_s=timeout_s)


def run_shown(
    command: Sequence[str], *, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> int:
    """Run to the end with its talk on our stderr; ended with everything it started when we are interrupted."""
    shown = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
        text=True,
    )
    try:
        return shown.wait()
    except BaseException:
        end(shown)
        raise


def start(command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start in a process group of its own; the caller must `finish` it."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, _SILENT: "ignore", **(environment or {})},
        start_new_session=True,
    )


def finish(child: subprocess.Popen[str], *, timeout_s: float) -> Ended:
    """Wait, and past the limit end the child with its whole process group."""
    try:
        stdout, stderr = child.communicate(timeout=timeout_s)
        return Ended(code=child.returncode, stdout=stdout, stderr=stderr)
    except subprocess.TimeoutExpired:
        end(child)
        return Ended(code=None, reason=f"no answer within {timeout_s:g} s")
    except BaseException:
        end(child)
        raise


def end(child: subprocess.Popen[str]) -> None:
    """Kill the process group of a child and reap it; a child that has ended already is fine."""
    kill(child)
    child.communicate()


def kill(child: subprocess.Popen[str]) -> None:
    """Kill the process group of a child, without reaping it."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)


def script(name: str) -> Path:
    """A program of children/, to be run by an interpreter that may not be ours."""
    return Path(str(resources.files("outrider.machine").joinpath("children", name)))


def answer(ended: Ended) -> dict[str, Any] | None:
    """The JSON object on the last line of stdout, if the child succeeded."""
    lines = ended.stdout.strip().splitlines()
    if ended.code != 0 or not lines:
        return None
    try:
        found = json.loads(lines[-1])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
