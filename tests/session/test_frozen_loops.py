"""Freezing and thawing in a user's own loop, on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("frozen_script.py")
POLICIES = ("auto", "sync", "balanced", "cadence", "async")


def run(folder: Path, *wishes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *wishes],
        cwd=folder,
        env={**os.environ, "OUTRIDER_DEVICES": "cpu,cpu@0.5", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def told(folder: Path) -> list[Any]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def layouts(folder: Path) -> list[dict[str, Any]]:
    timeline = json.loads((folder / "run" / "timeline.json").read_text())
    return [event for event in timeline["events"] if event["kind"] == "layout"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loops")
    wishes = [f"{case}:{policy}" for case in ("thawing", "adversaries") for policy in POLICIES]
    done = run(folder, *wishes)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_are_thawed_and_frozen_within_a_pass(ended: Path, policy: str) -> None:
    folder = ended / f"thawing-{policy}"
    first, second = told(folder)
    assert first == second
    start, thawed, frozen = layouts(folder)
    assert start["trained"] == 17
    assert (thawed["thawed"], thawed["trained"]) == (["0.bias", "0.weight"], 129)
    assert (frozen["frozen"], frozen["trained"]) == (["2.bias", "2.weight"], 112)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_halves_of_a_gan_are_averaged_though_they_require_gradients_by_turns(ended: Path, policy: str) -> None:
    folder = ended / f"adversaries-{policy}"
    first, second = told(folder)
    assert first == second
    assert [layout["trained"] for layout in layouts(folder)] == [49]


def test_a_rank_that_thaws_alone_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "differing:cadence")
    assert done.returncode != 0
    assert "0.weight was thawed on rank 1, and not on rank 0" in done.stderr
