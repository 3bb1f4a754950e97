"""TRL's SFTTrainer in a session, with adapters: prompts and completions of unequal length on unequal devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from integrations.hf_ranks import run_ranks

UNEQUAL = "cpu,cpu@0.4"
OWN_NUMBERS = "SessionTrainer gathers numbers of its own in its steps"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    ranks: list[dict[str, Any]] = run_ranks("sft", folder=tmp_path_factory.mktemp("plain"), policy=None)
    return ranks[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("balanced")


@pytest.fixture(scope="module")
def balanced(folder: Path) -> list[dict[str, Any]]:
    return run_ranks("sft", folder=folder, devices=UNEQUAL, policy="balanced")


def test_balanced_ranks_learn_what_one_device_does(plain: dict[str, Any], balanced: list[dict[str, Any]]) -> None:
    assert balanced[0]["weights"] == balanced[1]["weights"]
    assert balanced[0]["weights"] == pytest.approx(plain["weights"], abs=1e-3)
    assert balanced[0]["losses"] == pytest.approx(plain["losses"], abs=1e-4)
    assert balanced[0]["evaluated"] == pytest.approx(plain["evaluated"], abs=1e-4)
    assert balanced[0]["steps"] == plain["steps"] == 12


def test_it_goes_on_from_a_checkpoint(balanced: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    checkpoint = str(folder / "out" / "checkpoint-8")
    resumed = run_ranks("sft", folder=tmp_path, devices=UNEQUAL, policy="balanced", resume=checkpoint)
    assert resumed[0]["weights"] == pytest.approx(balanced[0]["weights"], abs=1e-3)


@pytest.mark.usefixtures("balanced")
def test_whose_numbers_it_logs_is_told_once_on_rank_0(folder: Path) -> None:
    assert [(folder / f"rank{rank}.log").read_text().count(OWN_NUMBERS) for rank in range(2)] == [1, 0]


def test_ranks_with_steps_of_their_own_end_with_one_model(plain: dict[str, Any], tmp_path: Path) -> None:
    first, second = run_ranks("sft", folder=tmp_path, devices=UNEQUAL, policy="cadence")
    assert first["weights"] == second["weights"]
    assert first["steps"] == 12
    assert first["evaluated"][-1] < first["evaluated"][0]
    assert (tmp_path / "final" / "adapter_model.safetensors").exists()
