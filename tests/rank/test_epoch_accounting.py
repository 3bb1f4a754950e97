"""The accounts of an epoch that a checkpoint has cut, on another number of ranks than before."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.rank.epoch_accounting import EpochAccounting
from outrider.record.epoch_metrics import EpochMetrics, RankAccount
from outrider.timeline.recorder import Recorder


def account(*, samples: int, seconds: float) -> dict[str, Any]:
    """What one rank did before the checkpoint."""
    told = RankAccount(
        loss_sum=2.0 * samples,
        loss_samples=samples,
        eval_sum=0.0,
        eval_samples=0,
        samples=samples,
        logged={},
        averages=3,
        average_cost_s=0.0,
        wait_s=0.0,
        seconds=seconds,
        eval_s=0.0,
        wants_stop=False,
    )
    return asdict(told)


def rank(number: int, *, size: int) -> EpochAccounting:
    """The accounting of a rank that takes 10 samples with a loss of 1 each."""
    meter = SimpleNamespace(samples=10, averages=1, average_cost_s=0.0, average_wait_s=0.0, slept_s=0.0)
    sums = SimpleNamespace(drain=lambda: (10.0, 10))
    replica = SimpleNamespace(loss_sums=sums, logged_scalars=SimpleNamespace(drain=OrderedDict), learning_rate=0.1)
    world = SimpleNamespace(
        rank=number, size=size, device=torch.device("cpu"), exchange_json=lambda told, **words: [told]
    )
    driver: Any = SimpleNamespace(meter=meter, anchor=None, drift=None)
    return EpochAccounting(driver, replica, world, recorder=Recorder(rank=number, origin_s=0.0))  # type: ignore[arg-type]


def rest_of_the_epoch(accounting: EpochAccounting) -> EpochMetrics:
    accounting.tell(seconds=5.0)
    return accounting.merged(accounting.so_far, epoch=0, train_s_before=0.0, first_s=0.0, is_complete=True)


@pytest.mark.parametrize("seconds", [(8.0, 7.0), (7.0, 8.0)])
def test_one_rank_that_continues_for_two_adds_the_time_of_the_longer(seconds: tuple[float, float]) -> None:
    alone = rank(0, size=1)
    alone.go_on([account(samples=40, seconds=seconds[0]), account(samples=20, seconds=seconds[1])])
    metrics = rest_of_the_epoch(alone)
    assert (metrics.samples, metrics.seconds) == (70, 13.0)
    assert metrics.loss == pytest.approx((60 * 2.0 + 10) / 70)


def test_a_rank_that_joins_has_not_waited_before_the_checkpoint() -> None:
    joined = rank(1, size=2)
    joined.go_on([account(samples=40, seconds=8.0)])
    joined.tell(seconds=5.0)
    [own] = joined.so_far
    assert (own.samples, own.seconds) == (10, 13.0)
