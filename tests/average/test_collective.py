"""Averages between two real processes over Gloo; both run once for all tests here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gloo")
    script = Path(__file__).with_name("gloo_rank.py")
    ranks = [subprocess.Popen([sys.executable, str(script), str(rank), str(folder)]) for rank in range(2)]
    try:
        assert [rank.wait(180) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_meeting_in_one_process_gives_the_bits_of_gloo(found: list[dict[str, Any]]) -> None:
    assert [rank["agrees"] for rank in found] == [True, True]


def test_a_thousand_verified_averages_stay_exact(found: list[dict[str, Any]]) -> None:
    assert [rank["many"]["windows"] for rank in found] == [1_001, 1_001]
    assert found[0]["many"]["words"] == found[1]["many"]["words"]


def test_sums_that_one_rank_begins_during_backward_give_the_bits_of_one_process(found: list[dict[str, Any]]) -> None:
    assert [rank["overlapped"] for rank in found] == [
        {"started": [0, 2, 2, 2, 2, 2], "agrees": True},
        {"started": [0] * 6, "agrees": True},
    ]


def test_drift_is_bit_identical_on_all_ranks(found: list[dict[str, Any]]) -> None:
    assert found[0]["many"]["drifts"] == found[1]["many"]["drifts"]
    assert min(found[0]["many"]["drifts"]) > 0


def test_maxima_broadcasts_and_gathers_reach_every_rank(found: list[dict[str, Any]]) -> None:
    expected = {"max": [1, 0], "broadcast": 1.0, "gather": [[0, 0], [1, 10]]}
    assert [rank["small"] for rank in found] == [expected, expected]


def test_cuda_tensors_are_never_handed_to_gloo(found: list[dict[str, Any]]) -> None:
    assert found[0]["refusal"] == "gloo was handed a cuda:0 tensor"


def test_a_lost_peer_is_an_error_that_names_the_cargo(found: list[dict[str, Any]]) -> None:
    loss = found[0]["loss"]
    assert loss["message"].startswith("rank 0 of 2 lost a peer while exchanging parameters (4,000 bytes over gloo): ")
    assert loss["hint"] == "look for the first error among the other ranks"
    assert loss["cause"] == "RuntimeError"
