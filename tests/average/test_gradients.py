"""Gradients of a shared step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from outrider.average.arena import Arena
from outrider.average.gradients import GradientExchange
from outrider.average.rank_facts import Settled
from outrider.average.transport.collective import meet
from outrider.errors import ConfigError


def exchanges_of(models: Sequence[nn.Module]) -> list[GradientExchange]:
    return [
        GradientExchange(Arena(model), rank=rank, world_size=len(models), num_facts=1)
        for rank, model in enumerate(models)
    ]


def share(exchanges: Sequence[GradientExchange], samples: Sequence[int]) -> list[Settled]:
    for exchange, own in zip(exchanges, samples, strict=True):
        exchange.pack(own, [float(own)])
    meet(exchanges)
    return [exchange.settle() for exchange in exchanges]


def test_unequal_shares_give_the_gradient_of_the_whole_batch() -> None:
    whole, *models = (nn.Linear(4, 3, dtype=torch.float64) for _ in range(4))
    for model in models:
        model.load_state_dict(whole.state_dict())
    exchanges = exchanges_of(models)
    batch = torch.randn(10, 4, dtype=torch.float64)
    whole(batch).square().mean().backward()
    for model, part in zip(models, batch.split([5, 3, 2]), strict=True):
        model(part).square().mean().backward()
    share(exchanges, [5, 3, 2])
    for model in models:
        torch.testing.assert_close(model.weight.grad, whole.weight.grad, rtol=0, atol=1e-14)


def test_a_rank_without_samples_gets_the_mean() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    exchanges = exchanges_of(models)
    models[0](torch.ones(1, 2)).sum().backward()
    models[1].weight.grad = torch.full((2, 2), float("nan"))
    settled = share(exchanges, [4, 0])
    torch.testing.assert_close(models[1].weight.grad, torch.ones(2, 2))
    assert settled[1].total_samples == 4


def test_a_gradient_that_only_one_rank_has_counts_as_zero_elsewhere() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    exchanges = exchanges_of(models)
    models[0].weight.grad = torch.ones(2, 2)
    models[0].bias.grad = torch.ones(2)
    models[1].weight.grad = torch.ones(2, 2)
    share(exchanges, [1, 3])
    assert models[1].bias.grad.tolist() == [0.25, 0.25]
    assert models[0].weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_gradient_that_no_rank_has_stays_none() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    exchanges = exchanges_of(models)
    models[0].weight.grad = torch.ones(2, 2)
    share(exchanges, [1, 1])
    assert models[0].bias.grad is None
    assert models[1].bias.grad is None


def test_sparse_gradients_become_dense() -> None:
    models = [nn.Embedding(4, 2, sparse=True), nn.Embedding(4, 2, sparse=True)]
    exchanges = exchanges_of(models)
    for row, model in enumerate(models):
        model(torch.tensor([row])).sum().backward()
    share(exchanges, [1, 1])
    assert models[0].weight.grad.tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]


def test_gradients_have_the_dtype_and_strides_of_their_parameters() -> None:
    layers = (nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.Linear(2, 2, dtype=torch.bfloat16))
    model = nn.ModuleList(layers)
    exchange = exchanges_of([model])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    share(exchange, [3])
    assert layers[0].weight.grad.stride() == layers[0].weight.stride()
    assert layers[1].weight.grad.dtype == torch.bfloat16
    assert layers[1].weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_complex_gradients_are_averaged() -> None:
    models = [nn.Linear(1, 2, bias=False, dtype=torch.complex64) for _ in range(2)]
    exchanges = exchanges_of(models)
    models[0].weight.grad = torch.tensor([[1 + 2j], [3j]])
    models[1].weight.grad = torch.tensor([[3 + 0j], [1j]])
    share(exchanges, [1, 1])
    assert models[0].weight.grad.tolist() == [[2 + 1j], [2j]]


def test_gradients_that_are_kept_and_added_to_stay_right() -> None:
    models = [nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)]
    exchanges = exchanges_of(models)
    for scale in (1.0, 2.0):
        for model in models:
            model.zero_grad(set_to_none=False)
            (model(torch.ones(1, 2)) * scale).sum().backward()
        share(exchanges, [1, 1])
    assert models[0].weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_gradients_that_are_kept_stay_right_beside_a_parameter_without_one() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    exchanges = exchanges_of(models)
    for _ in range(2):
        for rank, model in enumerate(models):
            (model.weight.sum() * (1 + rank)).backward()
        share(exchanges, [1, 1])
    assert models[0].weight.grad.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert models[0].bias.grad is None


def test_frozen_parameters_take_no_room() -> None:
    model = nn.Linear(32, 32)
    model.weight.requires_grad_(False)
    exchange = exchanges_of([model])[0]
    facts_and_presence = 16  # 2 * 2 + 1, rounded up to the alignment of what follows
    assert exchange.wires[0].numel() == facts_and_presence + 32


def test_a_parameter_thawed_later_gets_no_gradient_until_it_is_laid_out() -> None:
    model = nn.Linear(2, 3)
    model.weight.requires_grad_(False)
    exchange = exchanges_of([model])[0]
    model.weight.requires_grad_(True)
    model(torch.ones(4, 2)).sum().backward()
    exchange.pack(1, [0.0])
    exchange.settle()
    assert model.weight.grad is None
    assert model.bias.grad is not None


def test_by_hand_a_parameter_thawed_later_is_refused() -> None:
    model = nn.Linear(2, 3)
    model.weight.requires_grad_(False)
    exchange = GradientExchange(Arena(model, takes_all=True), rank=0, world_size=1, num_facts=1)
    model.weight.requires_grad_(True)
    model.weight.grad = torch.zeros(3, 2)
    with pytest.raises(ConfigError) as caught:
        exchange.pack(1, [0.0])
    assert str(caught.value) == (
        "a frozen parameter of shape (3, 2) got a gradient after training began\n"
        "hint: set requires_grad before training starts"
    )


def test_facts_and_samples_reach_every_rank() -> None:
    exchanges = exchanges_of([nn.Linear(1, 1), nn.Linear(1, 1)])
    settled = share(exchanges, [2**24 + 1, 2])
    assert settled[0] == settled[1]
    assert settled[0].facts == ((float(2**24 + 1),), (2.0,))
    assert settled[0].total_samples == 2**24 + 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("lacks_one", [False, True])
def test_a_mean_with_a_gradient_that_is_not_finite_can_be_dropped(bad: float, lacks_one: bool) -> None:
    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, dtype=torch.bfloat16)) for _ in range(2)]
    exchanges = exchanges_of(models)
    for model in models:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    models[0][0].weight.grad[1, 1] = bad
    if lacks_one:
        models[1][1].weight.grad = None
    settled = share(exchanges, [3, 1])
    for exchange in exchanges:
        exchange.drop_bad()
    assert [one.not_finite for one in settled] == [(0,), (0,)]
    for model in models:
        assert all(torch.equal(one.grad, torch.zeros_like(one)) for one in model.parameters())


def test_a_finite_mean_is_not_dropped() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    exchanges = exchanges_of(models)
    for model in models:
        model(torch.ones(1, 2)).sum().backward()
    share(exchanges, [3, 1])
    for exchange, model in zip(exchanges, models, strict=True):
        exchange.drop_bad()
        assert torch.equal(model.weight.grad, torch.ones(2, 2))
