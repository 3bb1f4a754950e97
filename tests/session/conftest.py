"""Runs user scripts as users do, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
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


SHARED = (
    *(f"plain:{policy}" for policy in ("auto", "sync", "cadence", "async", "balanced")),
    *(f"leaving:{policy}" for policy in ("auto", "sync", "cadence", "async", "balanced")),
    "accumulating:balanced",
    "adversaries:balanced",
    "two_sessions:sync",
    "by_hand:cadence",
    "resnet20_flow:cadence",
)
"""Cases that two ranks run one after the other: starting them costs more than the cases do."""


def run_script(folder: Path, *wishes: str, devices: str | None = None, starter: tuple[str, ...] = ()) -> Ended:
    """Run cases of `user_script.py`, CASE:POLICY each; `starter` comes before the script, as torchrun does."""
    variables = {name: value for name, value in os.environ.items() if name != "OUTRIDER_DEVICES"}
    if devices is not None:
        variables["OUTRIDER_DEVICES"] = devices
    done = subprocess.run(
        [sys.executable, *starter, str(SCRIPT), str(folder), *wishes],
        cwd=folder,
        env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    last = folder / wishes[-1].replace(":", "-")
    return Ended(code=done.returncode, stdout=done.stdout, stderr=done.stderr, folder=last)


@pytest.fixture(scope="session")
def script_runner() -> RunScript:
    return run_script


@pytest.fixture(scope="session")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run_script(tmp_path_factory.mktemp("shared"), *SHARED, devices="cpu,cpu@0.5")


@pytest.fixture(scope="session")
def on_two_ranks(_shared: Ended) -> Callable[[str], Ended]:
    """What a case of SHARED left behind."""
    return lambda wish: replace(_shared, folder=_shared.folder.parent / wish.replace(":", "-"))
