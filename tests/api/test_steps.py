"""Runs that are so many steps or samples long: their last epoch is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import outrider
from outrider.errors import ConfigError

from .conftest import Trainer

POLICIES = ["auto", "sync", "balanced", "cadence", "async"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [{"steps": 30}, {"samples": 240}])
def test_a_run_ends_after_its_steps(
    train_here: Trainer, policy: str, length: dict[str, int], read_json: Any, tmp_path: Path
) -> None:
    # 96 samples in batches of 8 are 12 steps.
    trained = train_here(policy=policy, **length).join()
    assert [epoch.samples for epoch in trained.epochs] == [96, 96, 48]
    assert [epoch.is_complete for epoch in trained.epochs] == [True, True, True]
    assert read_json(tmp_path / "run" / "record.json")["status"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_two_ranks_take_the_steps_of_the_whole_world(train_two: Trainer, policy: str, tmp_path: Path) -> None:
    trained = train_two(policy=policy, steps=30, run_dir=tmp_path).join()
    assert [epoch.samples for epoch in trained.epochs] == [96, 96, 48]


def test_steps_that_fill_epochs_are_the_same_run(train_here: Trainer, tmp_path: Path) -> None:
    train_here(epochs=2, run_dir=tmp_path / "epochs").join()
    train_here(steps=24, run_dir=tmp_path / "steps").join()
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("epochs", "steps"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("given", [{"epochs": 2, "steps": 3}, {"steps": 3, "samples": 4}])
def test_two_lengths_are_refused(train_here: Trainer, given: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        train_here(**given)
    assert str(caught.value) == (
        f"{' and '.join(given)} were given, and each of them says how long to train\n"
        "hint: pass one of epochs, steps and samples"
    )


def test_a_run_goes_on_with_more_steps(train_here: Trainer, tmp_path: Path) -> None:
    train_here(steps=40, anchor=2, speed_hints=[1], run_dir=tmp_path / "whole", checkpoint_every=0.5).join()
    train_here(steps=18, anchor=2, speed_hints=[1], run_dir=tmp_path / "cut", checkpoint_every=0.5).join()
    resumed = train_here(
        steps=40, anchor=2, speed_hints=[1], run_dir=tmp_path / "cut", checkpoint_every=0.5, resume=tmp_path / "cut"
    ).join()
    # The epoch that was cut after 6 of its 12 steps is told as a whole.
    assert [epoch.samples for epoch in resumed.epochs] == [12 * 8, 12 * 8, 4 * 8]
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_callbacks_see_how_far_the_run_has_come(train_here: Trainer) -> None:
    seen = []

    def look(context: outrider.EpochContext) -> None:
        seen.append((context.samples_seen, context.global_step, context.progress))

    train_here(steps=18, epoch_start=look, epoch_end=look).join()
    assert seen == [(0, 0, 0.0), (96, 12, 12 / 18), (96, 12, 12 / 18), (144, 18, 1.0)]


def test_the_remainder_of_an_epoch_can_be_left_out(train_here: Trainer) -> None:
    trained = train_here(batch_size=20, epochs=2, drop_last=True).join()
    assert [epoch.samples for epoch in trained.epochs] == [80, 80]


def test_sync_leaves_out_what_fills_no_step_of_all_ranks(train_two: Trainer, tmp_path: Path) -> None:
    trained = train_two(batch_size=20, policy="sync", drop_last=True, run_dir=tmp_path).join()
    assert [epoch.samples for epoch in trained.epochs] == [80]
    assert trained.epochs[0].share_by_rank == (0.5, 0.5)
