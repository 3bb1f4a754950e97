"""Real MNIST in the lab: Adam with `lr_scale="auto"` reaches an accuracy sooner than the fast device alone."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from outrider.bench.datasets.dataset_files import find_data
from outrider.bench.datasets.mnist import read_part
from outrider.bench.models.image_models import accuracy, cross_entropy_step, mlp
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench, LabRun, train

BESIDE = Path(__file__).parents[3] / "shared" / "data"
FOLDER = find_data("mnist", os.environ.get("OUTRIDER_DATA") or (BESIDE if BESIDE.is_dir() else None))
TARGET = 0.88

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER is None, reason="no MNIST files: set OUTRIDER_DATA to a folder that holds them"),
]


@pytest.fixture(scope="module")
def runs() -> dict[str, LabRun]:
    assert FOLDER is not None
    first = TensorDataset(*(column[:6_400] for column in read_part(FOLDER, "train").tensors))
    test = TensorDataset(*(column[:2_000] for column in read_part(FOLDER, "test").tensors))

    def run(policy: str, *speeds: float) -> LabRun:
        recipe = Recipe(
            model=mlp,
            optimizer=partial(torch.optim.Adam, lr=1e-3),
            step=cross_entropy_step,
            dataset=first,
            batch_size=64,
            epochs=2,
            policy=policy,
            evaluate=accuracy,
            eval_dataset=test,
            lr_scale="auto",
        )
        return train(recipe, Bench(speeds=speeds, average_cost=0.25), points_per_epoch=5)

    return {"solo": run("cadence", 1.0), "async": run("async", 1.0, 0.4), "cadence": run("cadence", 1.0, 0.4)}


@pytest.mark.parametrize("policy", ["async", "cadence"])
def test_the_target_is_reached_sooner_than_by_the_fast_device_alone(runs: dict[str, LabRun], policy: str) -> None:
    alone, together = runs["solo"].time_to(TARGET), runs[policy].time_to(TARGET)
    assert alone is not None
    assert together is not None
    assert alone / together > 1.1


@pytest.mark.parametrize("policy", ["async", "cadence"])
def test_the_accuracy_is_not_lower_than_that_of_one_device(runs: dict[str, LabRun], policy: str) -> None:
    assert (runs[policy].points[-1].eval or 0) > (runs["solo"].points[-1].eval or 1) - 0.01
