"""Real runs whose averages are rounded: replayed to the bit, resumed to the bit, and not those of fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import outrider
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench
from outrider.virtual.lab import train as train_in_lab

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def data() -> TensorDataset:
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def stop_after_epoch_0(context: outrider.EpochContext) -> None:
    if context.epoch == 0:
        context.stop()


def run_for_real(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    basics: dict[str, Any] = {"batch_size": 4, "epochs": 2, "seed": 3, "threads_per_rank": 1, "devices": "cpu,cpu"}
    outrider.train(make_model, make_optimizer, step, data(), run_dir=folder, **basics, **options).join()
    return load_file(folder / "model.safetensors")


def is_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.parametrize(("policy", "wire"), [("async", "int8"), ("cadence", "bf16")])
def test_the_lab_repeats_a_run_with_rounded_averages(tmp_path: Path, policy: str, wire: str) -> None:
    trained = run_for_real(tmp_path, policy=policy, wire=wire, anchor=2, verify=True, record_schedule=True)
    segments = json.loads((tmp_path / "schedule.json").read_text())["segments"]

    def replayed(wire: str) -> dict[str, torch.Tensor]:
        recipe = Recipe(
            model=make_model, optimizer=make_optimizer, step=step, dataset=data(), batch_size=4, epochs=2, seed=3,
            policy=policy, wire=wire,
        )  # fmt: skip
        return train_in_lab(recipe, Bench(speeds=(1.0, 1.0)), schedule=segments).state_dict()

    assert is_same(trained, replayed(wire))
    assert not is_same(trained, replayed("fp32"))


def test_a_resumed_run_goes_on_with_what_rounding_had_left_out(tmp_path: Path) -> None:
    options = {"policy": "cadence", "wire": "int8", "anchor": 2, "shares": [0.5, 0.5]}
    whole = run_for_real(tmp_path / "whole", **options)
    run_for_real(tmp_path / "cut", **options, epoch_end=stop_after_epoch_0)
    resumed = run_for_real(tmp_path / "resumed", **options, resume=tmp_path / "cut")
    assert is_same(whole, resumed)
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["options"]["wire"] == "int8"
