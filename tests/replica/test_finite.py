"""What counts as finite, at one look."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from outrider.average.arena import Arena
from outrider.average.gradients import GradientExchange
from outrider.average.transport.collective import meet
from outrider.errors import StepError
from outrider.replica.finite import FiniteCheck
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench, train


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, value: float) -> None:
    model = nn.Linear(300, 300).to(dtype)
    check = FiniteCheck(Arena(model))
    assert check.is_finite()
    with torch.no_grad():
        model.bias[7] = value
    assert not check.is_finite()


def test_many_finite_numbers_in_half_precision_are_finite() -> None:
    model = nn.Linear(400, 400).half()
    nn.init.constant_(model.weight, 100.0)
    assert FiniteCheck(Arena(model)).is_finite()


def test_a_mask_that_is_infinite_from_the_start_says_nothing() -> None:
    model = nn.Linear(2, 2)
    model.mask = nn.Parameter(torch.full((2,), float("-inf")), requires_grad=False)
    assert FiniteCheck(Arena(model)).is_finite()


def test_a_sum_of_gradients_names_the_rank_whose_gradient_is_not_finite() -> None:
    exchanges = []
    for rank in range(3):
        model = nn.Linear(4, 2)
        exchanges.append(GradientExchange(Arena(model), rank=rank, world_size=3, num_facts=1))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float("inf") if rank == 1 else 1.0)
        exchanges[-1].pack(4, [float(rank)])
    meet(exchanges)
    assert [exchange.settle().not_finite for exchange in exchanges] == [(1,), (1,), (1,)]
    # The next sum begins anew.
    for exchange in exchanges:
        for parameter in exchange.parameters:
            parameter.grad = torch.ones_like(parameter)
        exchange.pack(4, [0.0])
    meet(exchanges)
    settled = [exchange.settle() for exchange in exchanges]
    assert [one.not_finite for one in settled] == [(), (), ()]
    assert settled[0].facts == ((0.0,), (0.0,), (0.0,))


def spoiled_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    return loss + (next(model.parameters()).sum() * 0).sqrt() if bool((batch == 40).any()) else loss


@pytest.mark.parametrize("policy", ["auto", "sync", "balanced", "cadence", "async"])
@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 0.5)])
def test_the_lab_finds_a_gradient_that_is_not_finite(policy: str, speeds: tuple[float, ...]) -> None:
    recipe = Recipe(
        model=lambda: nn.Linear(1, 1),
        optimizer=partial(torch.optim.SGD, lr=1e-4),
        step=spoiled_step,
        dataset=torch.arange(64.0).reshape(64, 1),
        batch_size=8,
        policy=policy,
    )
    with pytest.raises(StepError, match=r"^rank [01] \(lab\), step \d: the gradient is not finite"):
        train(recipe, Bench(speeds=speeds))
