"""A user's loop in which rank 0 trains alone from time to time: everything is as on one device, on both ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("resting_script.py")
SIZE, EPOCHS = 328, 3


@dataclass(frozen=True)
class Told:
    """What a run left behind."""

    ranks: list[dict[str, Any]]
    stderr: str


def run(folder: Path, case: str, devices: str) -> Told:
    folder.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), case, devices],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    return Told(ranks, done.stderr)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Told]:
    folder, runs = tmp_path_factory.mktemp("resting"), dict[tuple[str, str], Told]()

    def once(case: str, devices: str) -> Told:
        if (case, devices) not in runs:
            runs[case, devices] = run(folder / f"{case}-{devices}", case, devices)
        return runs[case, devices]

    return once


def numbers(value: Any) -> list[float]:
    return [number for part in value for number in numbers(part)] if isinstance(value, list) else [value]


CASES = (
    "plain",
    "accumulating",
    "two habits",
    "by hand",
    "freezing",
    "thawing",
    "other form",
    "checkpoints",
    "loss scale",
)
"""Loops whose result is that of one device."""
LAGGING = ("own schedule", "late schedule", "own counter")
"""Loops that count the batches of their rank, which differ between ranks after a rest."""


@pytest.mark.parametrize("case", CASES)
def test_every_rank_ends_with_what_one_device_learns(told: Callable[[str, str], Told], case: str) -> None:
    """Parameters, running mean and optimizer states; also what code between two epochs sees on any rank."""
    [alone] = told(case, "cpu").ranks
    for rank in told(case, "cpu,cpu").ranks:
        assert numbers(rank["tensors"]) == pytest.approx(numbers(alone["tensors"]), abs=1e-12)
        assert rank["outputs"] == pytest.approx(alone["outputs"], abs=1e-9)
        assert rank["scale"] == alone["scale"]
        assert (rank["ticks"], rank["rates"]) == (alone["ticks"], pytest.approx(alone["rates"]))


@pytest.mark.parametrize("case", [*CASES, *LAGGING])
def test_every_sample_is_used_once_per_epoch(told: Callable[[str, str], Told], case: str) -> None:
    used = [Counter(rank["used"]) for rank in told(case, "cpu,cpu").ranks]
    assert sum(used, Counter()) == Counter(dict.fromkeys(range(SIZE), EPOCHS))
    assert sum(used[1].values()) < sum(used[0].values()) / 4


def test_two_ranks_may_rest(told: Callable[[str, str], Told]) -> None:
    [alone], ranks = told("plain", "cpu").ranks, told("plain", "cpu,cpu,cpu").ranks
    used = sum((Counter(rank["used"]) for rank in ranks), Counter())
    assert used == Counter(dict.fromkeys(range(SIZE), EPOCHS))
    for rank in ranks:
        assert numbers(rank["tensors"]) == pytest.approx(numbers(alone["tensors"]), abs=1e-12)


def test_a_break_of_rank_0_alone_ends_the_pass_for_all_at_its_batch(told: Callable[[str, str], Told]) -> None:
    [alone] = told("break", "cpu").ranks
    ranks = told("break", "cpu,cpu").ranks
    assert Counter(alone["used"]) == Counter(ranks[0]["used"]) + Counter(ranks[1]["used"])
    for rank in ranks:
        assert numbers(rank["tensors"]) == pytest.approx(numbers(alone["tensors"]), abs=1e-12)
        assert (rank["ticks"], rank["seen"]) == (alone["ticks"], alone["seen"])


@pytest.mark.parametrize("case", LAGGING)
def test_a_loop_that_counts_the_batches_of_its_rank_makes_the_others_rest_for_good(
    told: Callable[[str, str], Told], case: str
) -> None:
    lagging = told(case, "cpu,cpu")
    assert lagging.stderr.count("the loops of the ranks differ after some of them rested") == 1
    assert (
        'Count with s.global_step and s.batches_seen in place of counters of your own, or pass policy="balanced"'
        in (lagging.stderr)
    )
    used = [len(rank["used"]) for rank in lagging.ranks]
    assert used[1] < len(told("plain", "cpu,cpu").ranks[1]["used"])
    assert numbers(lagging.ranks[0]["tensors"]) == numbers(lagging.ranks[1]["tensors"])


@pytest.mark.parametrize("case", LAGGING)
def test_what_a_lagging_rank_changed_before_it_was_noticed_is_small(
    told: Callable[[str, str], Told], case: str
) -> None:
    """Gradients of one or two batches, at slightly other parameters."""
    [alone] = told(case, "cpu").ranks
    assert numbers(told(case, "cpu,cpu").ranks[0]["outputs"]) == pytest.approx(alone["outputs"], rel=0.02)


def test_nothing_is_said_where_the_loops_agree(told: Callable[[str, str], Told]) -> None:
    assert [told(case, "cpu,cpu").stderr for case in CASES] == [""] * len(CASES)


def test_a_mistake_of_rank_0_alone_ends_the_run_with_its_rank_and_step(told: Callable[[str, str], Told]) -> None:
    with pytest.raises(AssertionError, match=r"ValueError: the user's own mistake(.|\n)*on rank 0 \(cpu\), step 25"):
        told("raising", "cpu,cpu")


def test_groups_that_the_loop_adds_while_others_rest_are_refused(told: Callable[[str, str], Told]) -> None:
    with pytest.raises(AssertionError, match=r"add_param_group\(\) was called inside the loop"):
        told("adding a group", "cpu,cpu")
