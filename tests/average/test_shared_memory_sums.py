"""Sums in memory that three real processes share; they run once for all tests here."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NUM_RANKS = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("shared_memory_group")
    script = Path(__file__).with_name("shared_memory_rank.py")
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(NUM_RANKS), str(folder)])
        for rank in range(NUM_RANKS)
    ]
    try:
        assert [rank.wait(180) for rank in ranks] == [0, 0, -signal.SIGKILL]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def test_sums_of_any_size_have_the_bits_of_one_process(found: list[dict[str, Any]]) -> None:
    assert [rank["agrees"] for rank in found] == [True] * NUM_RANKS


def test_sums_without_a_pause_do_not_run_into_each_other(found: list[dict[str, Any]]) -> None:
    assert [rank["wrong"] for rank in found] == [0] * NUM_RANKS


def test_maxima_broadcasts_and_gathers_reach_every_rank(found: list[dict[str, Any]]) -> None:
    expected = {
        "max": [2, 0],
        "broadcast": [1.0, [True, False]],
        "strided": [[3.0, 6.0, 9.0], [3.0, 6.0, 9.0]],
        "double": [1.5, 1.5],
        "gather": [[0, 0], [1, 10], [2, 20]],
    }
    assert [rank["others"] for rank in found] == [expected] * NUM_RANKS


def test_where_one_rank_cannot_share_memory_all_are_told(found: list[dict[str, Any]]) -> None:
    expected = "rank 1 cannot share memory with the others"
    assert [rank["no shared memory"] for rank in found] == [expected] * NUM_RANKS


def test_nothing_is_left_in_the_file_system(found: list[dict[str, Any]]) -> None:
    assert [rank["left behind"] for rank in found] == [[]] * NUM_RANKS


def test_a_rank_that_does_not_come_is_named(found: list[dict[str, Any]]) -> None:
    assert found[0]["late"] == {
        "kind": "WaitError",
        "message": "rank 0 waited 0.2 s for parameters (4,000 bytes in shared memory) of rank 1",
        "hint": "that rank may be stuck or far slower than the others: look at the rank logs",
        "rank": 1,
    }


def test_a_rank_that_was_killed_is_named(found: list[dict[str, Any]]) -> None:
    lost = found[0]["lost"]
    assert lost["kind"] == "PeerLostError"
    assert lost["message"].startswith(f"rank 0 of 3 lost rank {lost['rank']} ")
    assert " while exchanging parameters (4,000 bytes in shared memory): " in lost["message"]
    assert lost["hint"] == "look for the first error among the other ranks"
