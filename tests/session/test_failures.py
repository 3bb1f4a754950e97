"""What goes wrong in a user's loop on several ranks: a break, an exception, a call in the wrong place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_break_on_one_rank_ends_the_epoch_on_all(on_two_ranks: Any, policy: str) -> None:
    ended = on_two_ranks(f"leaving:{policy}")
    assert ended.code == 0, ended.stderr
    counts = [json.loads((ended.folder / f"leaving{rank}.json").read_text())["counts"] for rank in range(2)]
    assert counts[1][0] == 3
    assert counts[0][0] < 41
    assert sum(count[1] for count in counts) >= 41


def test_after_a_break_all_ranks_have_the_same_parameters(on_two_ranks: Any) -> None:
    ended = on_two_ranks("leaving:balanced")
    assert ended.code == 0, ended.stderr
    first, second = (load_file(ended.folder / f"leaving{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    # What code after the loop has changed on a rank that left stays.
    assert [json.loads((ended.folder / f"leaving{rank}.json").read_text())["rate"] for rank in range(2)] == [0.025] * 2


def test_an_exception_in_one_rank_ends_the_run_and_is_told(tmp_path: Path, script_runner: Any) -> None:
    ended = script_runner(tmp_path, "failing:cadence", devices="cpu,cpu@0.5")
    assert ended.code == 1
    assert "error: rank 1 (cpu@0.5), step 2: ValueError: a bad batch" in ended.stderr
    assert 'raise ValueError("a bad batch")' in ended.stderr


def test_an_exception_on_the_only_rank_stays_what_it_is(tmp_path: Path, script_runner: Any) -> None:
    ended = script_runner(tmp_path, "failing:cadence", devices="cpu")
    assert ended.code == 1
    assert "ValueError: a bad batch" in ended.stderr
    assert "outrider: on rank 0 (cpu), step 2" in ended.stderr
    record = json.loads((ended.folder / "run" / "record.json").read_text())
    assert record["status"] == "failed"
    assert record["error"]["message"] == "rank 0 (cpu), step 2: ValueError: a bad batch"


def test_evaluate_together_on_rank_0_alone_is_told_and_not_waited_for(tmp_path: Path, script_runner: Any) -> None:
    ended = script_runner(tmp_path, "together_alone:cadence", devices="cpu,cpu@0.5")
    assert ended.code == 1
    told = "rank 0 waits for evaluate_together() on all ranks, rank 1 for the end of epoch 0: they would never meet"
    assert told in ended.stderr
    assert "under `if s.is_main:` use evaluate() instead of evaluate_together()" in ended.stderr
    assert json.loads((ended.folder / "run" / "record.json").read_text())["error"]["message"] == told


def test_averages_by_hand_are_weighted_by_samples(on_two_ranks: Any) -> None:
    ended = on_two_ranks("by_hand:cadence")
    assert ended.code == 0, ended.stderr
    averaged = load_file(ended.folder / "averaged1.safetensors")
    assert averaged["0.weight"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert averaged["1.running_mean"].tolist() == [0.25, 0.25]
    assert averaged["1.running_var"].tolist() == [2.1875, 2.1875]
    assert averaged["1.num_batches_tracked"].item() == 6
    sent = json.loads((ended.folder / "sent0.json").read_text())
    assert sent["gradients"] == [2.0, 2.0, 2.0, 2.0]
    assert load_file(ended.folder / "sent0.safetensors")["0.weight"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
