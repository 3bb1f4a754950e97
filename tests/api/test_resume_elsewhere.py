"""A run goes on with another number of ranks, or on devices of another kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outrider

pytestmark = pytest.mark.slow

ReadJson = Callable[[Path], Any]
SITTINGS = (2, 3, 1, 2)
"""Ranks of each sitting; every one but the last ends after one epoch."""


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def stop(context: outrider.EpochContext) -> None:
    context.stop()


@pytest.mark.parametrize("policy", ["auto", "sync", "balanced", "cadence", "async"])
def test_a_run_goes_on_with_any_number_of_ranks(
    problem: dict[str, Any],
    tmp_path: Path,
    read_json: ReadJson,
    capfd: pytest.CaptureFixture[str],
    policy: str,
) -> None:
    options = {**problem, "model": make_model, "optimizer": adam, "batch_size": 8, "epochs": 4, "policy": policy}
    options |= {"lr_scale": "auto", "average_optimizer": policy == "cadence", "run_dir": tmp_path / "run"}
    seen = []
    for number, num_ranks in enumerate(SITTINGS):
        more = {"resume": tmp_path / "run"} if number else {}
        ending = {"epoch_end": stop} if number < 3 else {}
        seen += outrider.train(**options, **more, **ending, devices=",".join(["cpu"] * num_ranks)).join().epochs
    assert [(epoch.epoch, epoch.samples, len(epoch.share_by_rank)) for epoch in seen] == [
        (0, 96, 2),
        (1, 96, 3),
        (2, 96, 1),
        (3, 96, 2),
    ]
    assert all(math.isfinite(epoch.loss) for epoch in seen)
    # The factor of three ranks must not stay with one.
    assert seen[2].learning_rate == pytest.approx(1e-2)
    record = read_json(tmp_path / "run" / "record.json")
    assert (record["status"], [epoch["epoch"] for epoch in record["epochs"]]) == ("finished", [0, 1, 2, 3])
    assert [line for line in capfd.readouterr().err.splitlines() if "resumed from" in line] == [
        "outrider: resumed from epoch 1 on cpu,cpu,cpu, saved on cpu,cpu: rank 0's optimizer state also serves rank 2, "
        "speeds are measured anew",
        "outrider: resumed from epoch 2 on cpu, saved on cpu,cpu,cpu: the optimizer state of ranks 1, 2 is left out, "
        "speeds are measured anew",
        "outrider: resumed from epoch 3 on cpu,cpu, saved on cpu: rank 0's optimizer state also serves rank 1, "
        "speeds are measured anew",
    ]
