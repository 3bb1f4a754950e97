"""What makes up for the shorter way of an average, and why."""

from __future__ import annotations

from functools import partial
from typing import Literal

import pytest
import torch
from torch import nn

from outrider.average.outer import Outer
from outrider.replica.averaging_compensation import Compensation, compensate
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica

PARAMETERS = [nn.Parameter(torch.zeros(2))]
ADAM = torch.optim.Adam(PARAMETERS)
SGD = torch.optim.SGD(PARAMETERS, lr=0.1, momentum=0.9)


def test_by_default_adam_keeps_its_learning_rate_and_gets_no_outer_step() -> None:
    assert compensate(ADAM, policy="async", outer="auto", lr_scale=replica().recipe.lr_scale) == Compensation(
        outer=Outer(),
        follows_ranks=False,
        reason='Adam normalises its steps: nothing is compensated unless lr_scale="auto" is passed',
    )


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_by_default_sgd_gets_the_outer_step_it_gets_with_auto(policy: str) -> None:
    default = compensate(SGD, policy=policy, outer="auto", lr_scale=replica().recipe.lr_scale)
    assert default == compensate(SGD, policy=policy, outer="auto", lr_scale="auto")
    assert default.outer.kind == "nesterov"


def test_asked_for_by_name_adam_lets_the_learning_rate_follow_the_ranks() -> None:
    assert compensate(ADAM, policy="async", outer="auto", lr_scale="auto") == Compensation(
        outer=Outer(),
        follows_ranks=True,
        reason="Adam normalises its steps: the learning rate follows the effective number of ranks",
    )


@pytest.mark.parametrize(("policy", "momentum"), [("cadence", "bold"), ("async", "auto")])
def test_sgd_gets_an_outer_step_that_follows_the_shares(policy: str, momentum: Literal["auto", "bold"]) -> None:
    assert compensate(SGD, policy=policy, outer="auto", lr_scale="auto") == Compensation(
        outer=Outer(kind="nesterov", momentum=momentum),
        follows_ranks=False,
        reason="SGD does not normalise its steps: an outer Nesterov step follows the ranks' shares",
    )


def test_short_windows_get_less_momentum_than_cadence_has_in_long_ones() -> None:
    made = compensate(SGD, policy="cadence", outer="auto", lr_scale=1.0, shortest_window=19)
    assert made.outer == Outer(kind="nesterov", momentum="auto")
    assert made.reason == (
        "SGD does not normalise its steps: an outer Nesterov step follows the ranks' shares, "
        "with less momentum, as windows may be shorter than 20 batches"
    )


@pytest.mark.parametrize(
    ("options", "momentum"),
    [({}, "auto"), ({"anchor": 5}, "auto"), ({"anchor": 20}, "bold"), ({"min_anchor": 20}, "bold")],
)
def test_the_options_for_windows_decide_on_the_momentum(options: dict[str, int], momentum: str) -> None:
    made = replica(optimizer=partial(torch.optim.SGD, lr=0.1), policy="cadence", **options)
    assert made.compensation.outer.momentum == momentum


@pytest.mark.parametrize("policy", ["sync", "balanced", "independent"])
def test_policies_that_do_not_average_parameters_are_left_alone(policy: str) -> None:
    made = compensate(ADAM, policy=policy, outer="auto", lr_scale="auto")
    assert (made.outer, made.follows_ranks) == (Outer(), False)


def test_an_outer_step_that_was_given_is_the_only_one() -> None:
    given = Outer(kind="slowmo", momentum=0.3)
    made = compensate(ADAM, policy="async", outer=given, lr_scale="auto")
    assert (made.outer, made.follows_ranks, made.reason) == (given, False, "outer=slowmo was given")


def test_a_scale_that_was_given_is_the_only_one() -> None:
    made = compensate(SGD, policy="async", outer="auto", lr_scale=2.0)
    assert (made.outer, made.follows_ranks, made.reason) == (Outer(), False, "lr_scale=2 was given")


def replica(**options: object) -> Replica:
    usual = {
        "model": lambda: nn.Linear(1, 1, bias=False),
        "optimizer": partial(torch.optim.Adam, lr=0.5),
        "step": lambda model, batch: model(batch).sum(),
        "dataset": [0],
        "batch_size": 1,
        "policy": "async",
    }
    recipe = Recipe(**usual | options)  # type: ignore[arg-type]
    return Replica(recipe, device=torch.device("cpu"), rank=0, name="cpu")


def test_the_factor_is_on_the_step_and_not_on_what_a_scheduler_sees() -> None:
    trained = replica(lr_scale="auto", scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5))
    trained.saw_ranks(2.0)
    before = trained.model.weight.item()
    trained.step(torch.ones(1, 1), samples=1, at=0)
    assert before - trained.model.weight.item() == pytest.approx(1.0, rel=1e-4)
    trained.step(torch.ones(1, 1), samples=1, at=1)
    assert trained.optimizer.param_groups[0]["lr"] == 0.25
    assert trained.learning_rate == 0.5


def test_a_given_scale_is_on_the_learning_rate_from_the_start() -> None:
    trained = replica(lr_scale=3.0)
    trained.saw_ranks(2.0)
    assert trained.learning_rate == 1.5
