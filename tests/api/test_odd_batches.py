"""A model with BatchNorm, which cannot train on a single sample, and a number of samples that leaves one over."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import outrider

from .conftest import Trainer, make_data, make_optimizer, squared_error

BATCH = 16
SAMPLES = 97


def normed_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def step(model: nn.Module, batch: Any) -> Any:
    outrider.log("samples", float(len(batch[0])))
    return squared_error(model, batch)


ODD = {"model": normed_model, "dataset": make_data(SAMPLES), "batch_size": BATCH, "step": step}


@pytest.mark.parametrize("policy", ["auto", "sync", "balanced", "cadence", "async"])
@pytest.mark.parametrize("checkpoint_every", [None, 0.5])
def test_one_device_takes_a_sample_that_is_left_over(
    train_here: Trainer, policy: str, checkpoint_every: float | None
) -> None:
    trained = train_here(**ODD, policy=policy, checkpoint_every=checkpoint_every).join()
    assert trained.epochs[0].samples == SAMPLES
    # Weighted by samples: five batches of 16 and one of 17.
    assert trained.epochs[0].logged["samples"] == pytest.approx((5 * 16 * 16 + 17 * 17) / SAMPLES)


@pytest.mark.parametrize("policy", ["auto", "sync", "balanced", "cadence", "async"])
def test_two_devices_take_a_sample_that_is_left_over(train_two: Trainer, policy: str, tmp_path: Any) -> None:
    trained = train_two(**ODD, policy=policy, epochs=2, checkpoint_every=0.5, run_dir=tmp_path).join()
    assert [epoch.samples for epoch in trained.epochs] == [SAMPLES, SAMPLES]


@pytest.mark.parametrize("accumulate", [3, 5])
def test_no_piece_of_a_batch_has_a_single_sample(train_here: Trainer, accumulate: int) -> None:
    # 101 samples in batches of 16 end in one of 5, which three or five pieces would cut down to one.
    trained = train_here(**ODD | {"dataset": make_data(101)}, accumulate=accumulate).join()
    assert trained.epochs[0].samples == 101


@pytest.mark.parametrize("policy", ["balanced", "cadence"])
def test_a_loop_of_the_user_gets_no_batch_of_a_single_sample(policy: Any, tmp_path: Any) -> None:
    sizes = []
    model = normed_model()
    with outrider.Session(devices="cpu", policy=policy, run_dir=tmp_path) as session:
        session.prepare(model, make_optimizer(model.parameters()))
        for batch in session.batches(make_data(SAMPLES), batch_size=BATCH):
            sizes.append(len(batch[0]))
            session.step(squared_error(model, batch))
    assert sizes == [16, 16, 16, 16, 16, 17]
