"""The rules by which a step on several batches may learn; the study itself needs a GPU and an hour."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.bench.datasets.source import DataSource
from outrider.bench.zoo import suite_task

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "joined_batches.py"))
NUM_RANKS = 2


def trained(rule: str, *, ticks: int) -> torch.optim.Optimizer:
    """The optimizer of a ruled task after so many ticks of its schedule; all of them are 400."""
    data = DataSource(folder=None, max_samples=1280, may_download=False)
    task = suite_task("resnet20", data=data, epochs=40, seed=0, batch_size=128)
    ruled = SCRIPT["RULES"][rule](task, NUM_RANKS)
    optimizer = ruled.optimizer([nn.Parameter(torch.zeros(1))])
    scheduler = ruled.scheduler(optimizer)
    for _ in range(ticks):
        optimizer.step()
        scheduler.step()
    return optimizer


@pytest.mark.parametrize(
    ("rule", "rate", "momentum"),
    [("same", 0.1, 0.9), ("times", 0.2, 0.9), ("warm", 0.2, 0.9), ("root", 0.1 * 2**0.5, 0.9), ("heavy", 0.1, 0.95)],
)
def test_rate_and_momentum_by_rule(rule: str, rate: float, momentum: float) -> None:
    for ticks, factor in ((20, 1.0), (200, 0.1), (300, 0.01)):
        (group,) = trained(rule, ticks=ticks).param_groups
        assert (group["lr"], group["momentum"]) == (pytest.approx(rate * factor), pytest.approx(momentum))


def test_a_warm_up_begins_at_the_rate_of_one_batch() -> None:
    rates = [trained("warm", ticks=ticks).param_groups[0]["lr"] for ticks in (0, 5, 10)]
    assert rates == pytest.approx([0.1, 0.15, 0.2])
