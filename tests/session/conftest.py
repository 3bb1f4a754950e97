"""Runs user scripts as users do, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("user_script.py")
RunScript = Callable[..., "Ended"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A script that came to its end."""

    code: int
    stdout: str
    stderr: str
    folder: Path


def run_script(
    folder: Path, case: str, *, devices: str | None = None, starter: tuple[str, ...] = (), policy: str = "cadence"
) -> Ended:
    """Run one case of `user_script.py`; `starter` comes before the script, as torchrun does."""
    variables = {name: value for name, value in os.environ.items() if name != "OUTRIDER_DEVICES"}
    if devices is not None:
        variables["OUTRIDER_DEVICES"] = devices
    done = subprocess.run(
        [sys.executable, *starter, str(SCRIPT), case, policy],
        cwd=folder,
        env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return Ended(code=done.returncode, stdout=done.stdout, stderr=done.stderr, folder=folder)


@pytest.fixture(scope="session")
def script_runner() -> RunScript:
    return run_script
