"""A user's loop in which rank 0 soon trains alone: everything is as on one device, on both ranks."""

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


def run(folder: Path, cases: tuple[str, ...], devices: str) -> dict[str, Told]:
    """Train the cases one after the other, in one process."""
    folders = {case: folder / f"{case}-{devices}" for case in cases}
    for one in folders.values():
        one.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), ",".join(cases), devices],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {
        case: Told([json.loads(path.read_text()) for path in sorted(one.glob("rank*.json"))], done.stderr)
        for case, one in folders.items()
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Told]:
    folder, runs = tmp_path_factory.mktemp("resting"), dict[tuple[str, str], Told]()

    def once(case: str, devices: str) -> Told:
        if (case, devices) not in runs:
            # One device needs no processes of its own, so all cases share theirs.
            cases = (*CASES, *LAGGING, "break") if devices == "cpu" else (case,)
            runs.update({(name, devices): one for name, one in run(folder, cases, devices).items()})
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
    "thawing late",
    "modes",
    "other form",
    "checkpoints",
    "loss scale",
    "late mean",
)
LAGGING = ("own schedule", "late schedule", "own counter", "own weight", "own teacher", "own turns")
"""Loops that count the batches of their rank, or have a copy of their own: on ranks that rest these stand still."""


@pytest.mark.parametrize("case", CASES)
def test_every_rank_ends_with_what_one_device_learns(told: Callable[[str, str], Told], case: str) -> None:
    """Parameters, running mean and optimizer states; also what code between two epochs sees on any rank."""
    [alone] = told(case, "cpu").ranks
    for rank in told(case, "cpu,cpu").ranks:
        assert numbers(rank["tensors"]) == pytest.approx(numbers(alone["tensors"]), abs=1e-12)
        assert rank["outputs"] == pytest.approx(alone["outputs"], abs=1e-9)
        assert rank["scale"] == alone["scale"]
        assert (rank["ticks"], rank["rates"]) == (alone["ticks"], pytest.approx(alone["rates"]))
        assert rank["modes"] == alone["modes"]


@pytest.mark.parametrize("case", LAGGING)
def test_what_stands_still_on_ranks_that_rest_changes_no_result(told: Callable[[str, str], Told], case: str) -> None:
    """Rank 0 stays alone, so no gradient is computed where the loop lags behind."""
    [alone] = told(case, "cpu").ranks
    for rank in told(case, "cpu,cpu").ranks:
        assert rank["outputs"] == pytest.approx(alone["outputs"], abs=1e-9)


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
        # Code after the loop halves a rate once on every rank.
        assert rank["rates"] == pytest.approx(alone["rates"])


def test_nothing_is_said_of_rests(told: Callable[[str, str], Told]) -> None:
    cases = [*CASES, *LAGGING]
    assert [told(case, "cpu,cpu").stderr for case in cases] == [""] * len(cases)


def test_a_rank_without_batches_is_told_why_its_own_mean_fails(told: Callable[[str, str], Told]) -> None:
    with pytest.raises(AssertionError, match=r"ZeroDivisionError(.|\n)*on rank 1 (.|\n)*rank 0 trained alone in the"):
        told("own mean", "cpu,cpu")


def test_a_mistake_of_rank_0_alone_ends_the_run_with_its_rank_and_step(told: Callable[[str, str], Told]) -> None:
    with pytest.raises(AssertionError, match=r"ValueError: the user's own mistake(.|\n)*on rank 0 \(cpu\), step 25"):
        told("raising", "cpu,cpu")


def test_groups_that_the_loop_adds_while_others_rest_are_refused(told: Callable[[str, str], Told]) -> None:
    with pytest.raises(AssertionError, match=r"add_param_group\(\) was called inside the loop"):
        told("adding a group", "cpu,cpu")
