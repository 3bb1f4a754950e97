"""One replica: its step, its schedule, its randomness and its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from outrider.errors import StepError
from outrider.replica.loss_sums import LossSums
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica

CPU = torch.device("cpu")
DATA = torch.ones(8, 2)


def mean_output(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).mean()


def make(rank: int = 0, **options: Any) -> Replica:
    recipe = Recipe(
        **{
            "model": lambda: nn.Linear(2, 1),
            "optimizer": lambda p: torch.optim.SGD(p, lr=1.0),
            "step": mean_output,
            "dataset": DATA,
            "batch_size": 4,
            **options,
        }
    )
    return Replica(recipe, device=CPU, rank=rank, name="cpu")


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


@pytest.mark.parametrize(("at", "rate"), [(0, 1.0), (3, 1.0), (4, 0.5), (11, 0.25), (12, 0.125)])
def test_the_learning_rate_is_a_function_of_the_samples_of_the_world(at: int, rate: float) -> None:
    replica = make(scheduler=halved)
    replica.step(DATA, samples=8, at=at)
    assert replica.optimizer.param_groups[0]["lr"] == rate


def test_the_learning_rate_does_not_depend_on_how_the_samples_were_reached() -> None:
    once, often = make(scheduler=halved), make(scheduler=halved)
    once.step(DATA, samples=8, at=12)
    for at in (0, 4, 8, 12):
        often.step(DATA, samples=8, at=at)
    assert once.optimizer.param_groups[0]["lr"] == often.optimizer.param_groups[0]["lr"]


def test_the_schedule_never_goes_back() -> None:
    replica = make(scheduler=halved)
    replica.step(DATA, samples=8, at=12)
    replica.step(DATA, samples=8, at=4)
    assert replica.optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.filterwarnings("error")
def test_a_first_step_after_those_of_others_brings_no_advice_on_the_order_of_schedule_and_optimizer() -> None:
    make(scheduler=halved).step(DATA, samples=8, at=12)


def test_ranks_start_equal_and_draw_differently() -> None:
    first, second = make(rank=0), make(rank=1)
    assert torch.equal(first.arena.flats[torch.float32], second.arena.flats[torch.float32])
    make(rank=0)
    of_rank_0 = torch.rand(4)
    make(rank=1)
    assert not torch.equal(of_rank_0, torch.rand(4))


def test_a_step_without_samples_leaves_no_gradient() -> None:
    replica = make()
    replica.gradient(DATA, samples=8)
    replica.no_gradient()
    assert all(parameter.grad is None for parameter in replica.model.parameters())


def test_a_restored_replica_goes_on_where_the_other_was() -> None:
    first, second = make(scheduler=halved), make(scheduler=halved, seed=9)
    first.step(DATA, samples=8, at=12)
    second.restore(first.state())
    assert (second.steps, second.ticks) == (1, 3)
    assert second.optimizer.param_groups[0]["lr"] == 0.125


def test_a_loss_that_is_not_finite_leaves_the_parameters_alone() -> None:
    replica = make(step=lambda model, batch: model(batch).mean() * float("inf"))
    before = replica.arena.flats[torch.float32].clone()
    with pytest.raises(StepError):
        replica.step(DATA, samples=8, at=0)
    assert torch.equal(replica.arena.flats[torch.float32], before)


def test_the_tally_names_the_first_bad_step() -> None:
    loss_sums = LossSums(CPU)
    for step, loss in enumerate([1.0, float("inf"), float("nan"), 1.0]):
        loss_sums.add(torch.tensor(loss), 2, step)
    assert loss_sums.bad_steps().loss == 1


def test_the_tally_is_weighted_by_samples_and_starts_anew_when_drained() -> None:
    loss_sums = LossSums(CPU)
    loss_sums.add(torch.tensor(1.0), 3, 0)
    loss_sums.add(torch.tensor(5.0), 1, 1)
    assert loss_sums.mean_so_far() == 2.0
    assert loss_sums.drain() == (8.0, 4)
    assert loss_sums.mean_so_far() is None
