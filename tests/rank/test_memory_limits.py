"""A CPU rank with a limit of memory stands for a small card: memory really runs out, and the run goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outrider

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(sys.platform != "linux", reason="memory of CPU ranks can be limited on Linux only"),
]

WIDTH, BATCH = 65_536, 1_024
"""An activation of a batch has 256 MiB, and a step several."""


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-6)


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def train(folder: Path, devices: str) -> outrider.Run:
    data = torch.randn(2 * BATCH, 2, generator=torch.Generator().manual_seed(1))
    run = outrider.train(
        make_model,
        make_optimizer,
        squares,
        data,
        batch_size=BATCH,
        policy="sync",
        devices=devices,
        threads_per_rank=1,
        run_dir=folder,
    )
    run.join()
    return run


def test_a_rank_with_little_memory_computes_smaller_micro_batches(tmp_path: Path) -> None:
    done = train(tmp_path, "cpu,cpu:400MiB")
    assert [epoch.samples for epoch in done.epochs] == [2 * BATCH]
    events = json.loads((tmp_path / "timeline.json").read_text())["events"]
    (event,) = [event for event in events if event["kind"] == "micro-batch"]
    assert event["rank"] == 1
    assert event["value"] < BATCH


def test_more_memory_than_there_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(outrider.DeviceError, match=r"^rank 0 is to use 900000GiB of cpu, which has \d+\.\d GiB"):
        train(tmp_path, "cpu:900000GiB")
