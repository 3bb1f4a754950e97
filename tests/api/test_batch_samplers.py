"""`train()` on the batches of a batch sampler, on two ranks: each goes whole to one of them."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import outrider

SIZES = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5]
NUMBERS = TensorDataset(torch.arange(float(sum(SIZES))).reshape(-1, 1) / 100)
BATCHES = [[sum(SIZES[:number]) + at for at in range(size)] for number, size in enumerate(SIZES)]


def step_that_notes(model: nn.Module, batch: Any, *, folder: Path) -> torch.Tensor:
    (numbers,) = batch
    with (folder / f"{os.getpid()}.txt").open("a") as file:
        print(*(round(100 * float(number)) for number in numbers), file=file)
    return model(numbers).square().mean()


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def make_model() -> nn.Module:
    return nn.Linear(1, 1)


def start(step: Any, policy: str, folder: Path, *, epochs: int) -> outrider.Run:
    loader = DataLoader(NUMBERS, batch_sampler=BATCHES)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    options: dict[str, Any] = {"devices": "cpu,cpu@0.5", "policy": policy, "epochs": epochs, "run_dir": folder / "run"}
    return outrider.train(make_model, optimizer, step, loader, quiet=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_each_batch_goes_whole_to_one_of_two_ranks(policy: str, tmp_path: Path) -> None:
    trained = start(partial(step_that_notes, folder=tmp_path), policy, tmp_path, epochs=2).join()
    notes = [path.read_text().splitlines() for path in tmp_path.glob("*.txt")]
    assert len(notes) == 2
    assert sorted([*notes[0], *notes[1]]) == sorted(2 * [" ".join(map(str, batch)) for batch in BATCHES])
    assert [epoch.samples for epoch in trained.epochs] == [len(SIZES)] * 2


def test_the_record_of_train_has_the_sizes_of_its_batches_and_is_replayed(tmp_path: Path) -> None:
    loader = DataLoader(NUMBERS, batch_sampler=BATCHES)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    folder = tmp_path / "run"
    options: dict[str, Any] = {"epochs": 1, "run_dir": folder, "record_schedule": True}
    outrider.train(make_model, optimizer, step, loader, devices="cpu", quiet=True, **options).join()
    record = json.loads((folder / "record.json").read_text())
    assert record["options"]["batch_size"] == sorted(set(SIZES))
    facts = {"name": "list", "batches": len(SIZES), "samples": sum(SIZES)}
    assert record["options"]["batch_sampler"] == facts
    config = json.loads((folder / "config.json").read_text())["options"]
    assert (config["batch_size"], config["batch_sampler"]) == (None, {"name": "list"})
    replayed = outrider.replay(
        folder, model=make_model, optimizer=optimizer, step=step, dataset=loader, devices="cpu", epochs=1
    )
    assert [epoch.has_same_bits for epoch in replayed.epochs] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["balanced", "auto"])
def test_policies_that_divide_batches_refuse_them(policy: str, tmp_path: Path) -> None:
    with pytest.raises(outrider.ConfigError) as caught:
        start(partial(step_that_notes, folder=tmp_path), policy, tmp_path, epochs=1).join()
    assert f"list makes batches that are handed out whole, and policy {policy!r} divides" in caught.value.message
    assert caught.value.hint == "choose another policy: sync, cadence, async"
