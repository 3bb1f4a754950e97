"""A user's own script on two slices of one GPU: every policy over nccl, two optimizers, averages by hand, a break."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).parents[1] / "session" / "user_script.py"
POLICIES = ("auto", "sync", "balanced", "cadence", "async")
WISHES = (
    *(f"plain:{policy}" for policy in POLICIES),
    "leaving:async",
    "leaving:sync",
    "adversaries:balanced",
    "by_hand:cadence",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases one after the other in one pair of ranks; starting CUDA costs more than they do."""
    base = tmp_path_factory.mktemp("sessions")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(base), *WISHES],
        env={**os.environ, "OUTRIDER_DEVICES": "cuda:0%60,cuda:0%20"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return base


@pytest.mark.parametrize("policy", POLICIES)
def test_a_session_trains_over_nccl(folder: Path, policy: str) -> None:
    record = json.loads((folder / f"plain-{policy}" / "run" / "record.json").read_text())
    assert (record["status"], record["backend"]) == ("finished", "nccl")
    facts = json.loads((folder / f"plain-{policy}" / "plain0.json").read_text())
    assert facts["together"] > 0.8


@pytest.mark.parametrize("case", ["plain-sync/plain", "plain-cadence/plain", "leaving-sync/leaving"])
def test_ranks_end_with_the_same_parameters(folder: Path, case: str) -> None:
    first, second = (load_file(folder / f"{case}{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_break_on_one_rank_ends_the_epoch_on_all(folder: Path) -> None:
    counts = [json.loads((folder / "leaving-async" / f"leaving{rank}.json").read_text())["counts"] for rank in range(2)]
    assert counts[1][0] == 3
    assert counts[0][0] < 41


def test_averages_by_hand_are_weighted_by_samples(folder: Path) -> None:
    averaged = load_file(folder / "by_hand-cadence" / "averaged1.safetensors")
    assert averaged["0.weight"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert averaged["1.running_var"].tolist() == [2.1875, 2.1875]
    assert json.loads((folder / "by_hand-cadence" / "sent0.json").read_text())["gradients"] == [2.0] * 4
