"""Checkpoints in the middle of an epoch, by the clock or at a stop: nothing is trained on twice or left out."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outrider

Trainer = Callable[..., outrider.Run]
Events = Callable[[Path, str], list[dict[str, Any]]]
NUM_SAMPLES = 480
POLICIES = ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sync", "balanced", "cadence", "async"))]


def numbered() -> torch.Tensor:
    return torch.arange(NUM_SAMPLES, dtype=torch.float64)


def kept_in(folder: Path) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """A step that writes down which samples it was given."""

    def step(model: nn.Module, numbers: torch.Tensor) -> torch.Tensor:
        with open(folder / f"{os.getpid()}.samples", "a") as file:
            file.write("".join(f"{round(number)}\n" for number in numbers.tolist()))
        return model(torch.ones(len(numbers), 4)).square().mean()

    return step


def used(folder: Path) -> Counter[int]:
    files = sorted(folder.glob("*.samples"))
    return Counter(int(line) for file in files for line in file.read_text().split())


@pytest.mark.parametrize("policy", POLICIES)
def test_pauses_for_checkpoints_use_every_sample_once_per_epoch(
    train_two: Trainer, tmp_path: Path, events: Events, policy: str
) -> None:
    options = {"step": kept_in(tmp_path), "dataset": numbered(), "anchor": 3, **never_alone(policy)}
    trained = train_two(**options, epochs=2, checkpoint_every="0.01s", run_dir=tmp_path / "run").join()
    assert used(tmp_path) == Counter(dict.fromkeys(range(NUM_SAMPLES), 2))
    assert [(epoch.samples, epoch.is_complete) for epoch in trained.epochs] == [(NUM_SAMPLES, True)] * 2
    in_epochs = [event for event in events(trained.run_dir, "checkpoint") if event["position"]]
    assert len(in_epochs) > 2


def never_alone(policy: str) -> dict[str, Any]:
    """The policy, without rests: a rank alone looks up only every two seconds, which is longer than these runs."""
    return {"policy": policy, **({"shares": (0.5, 0.5)} if policy in ("auto", "balanced") else {})}


def stop_soon(run: outrider.Run, folder: Path) -> None:
    while used(folder).total() < 100:
        run.poll()
    run.stop()
    run.join()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_that_was_stopped_and_resumed_uses_every_sample_once(
    train_two: Trainer, tmp_path: Path, policy: str
) -> None:
    slow = {"devices": "cpu@0.2,cpu@0.1", "step": kept_in(tmp_path), "dataset": numbered()}
    options = {**slow, "anchor": 2, "run_dir": tmp_path / "run", **never_alone(policy)}
    stop_soon(train_two(**options), tmp_path)
    assert 100 <= used(tmp_path).total() < NUM_SAMPLES
    trained = train_two(**options, resume=tmp_path / "run").join()
    assert used(tmp_path) == Counter(dict.fromkeys(range(NUM_SAMPLES), 1))
    epochs = json.loads((tmp_path / "run" / "record.json").read_text())["epochs"]
    # One row, of the whole epoch: what was done before the stop is part of it.
    assert [(epoch["samples"], epoch["is_complete"]) for epoch in epochs] == [(NUM_SAMPLES, True)]
    assert trained.epochs[-1].samples == NUM_SAMPLES


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))


def test_two_ranks_that_pause_in_shared_steps_equal_those_that_do_not(train_two: Trainer, tmp_path: Path) -> None:
    """Running means of each rank's own too: ranks merge them for the checkpoint, and go on as if they had not."""
    options = {"model": with_batch_norm, "policy": "sync", "epochs": 3, "devices": "cpu,cpu"}
    whole = train_two(**options, checkpoint_every=None, run_dir=tmp_path / "whole").join()
    paused = train_two(**options, checkpoint_every="0.001s", run_dir=tmp_path / "paused").join()
    assert all(torch.equal(whole.state_dict[name], tensor) for name, tensor in paused.state_dict.items())


def test_a_run_with_pauses_learns_what_one_without_does(train_here: Trainer, tmp_path: Path) -> None:
    """With shared steps a pause falls between two of them, whenever it comes."""
    options = {"policy": "sync", "epochs": 3}
    whole = train_here(**options, run_dir=tmp_path / "whole").join()
    paused = train_here(**options, checkpoint_every="0.001s", run_dir=tmp_path / "paused").join()
    assert all(torch.equal(whole.state_dict[name], tensor) for name, tensor in paused.state_dict.items())
    assert [epoch.loss for epoch in whole.epochs] == pytest.approx([epoch.loss for epoch in paused.epochs])


@pytest.mark.parametrize("bad", ["soon", "10 parsecs", "0min", "-3s", -1, 0, True])
def test_a_distance_that_is_no_time_and_no_number_of_epochs_is_refused(train_here: Trainer, bad: Any) -> None:
    with pytest.raises(outrider.ConfigError) as refused:
        train_here(checkpoint_every=bad)
    assert refused.value.message == f"checkpoint_every must be a number of epochs > 0 or a time, got {bad!r}"
    assert refused.value.hint == (
        'pass checkpoint_every=1 for every epoch, 0.5 for twice per epoch, "10min" by time, or None for never'
    )
