"""From the outer step's look-ahead to the average and on again, with the model on a GPU and the sums on either side."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.average.arena import Arena
from outrider.average.exchange import Exchange
from outrider.average.outer import Outer
from outrider.average.transport.collective import meet_pieces

SAMPLES = (3, 1)


def average(exchanges: list[Exchange]) -> None:
    for exchange, samples in zip(exchanges, SAMPLES, strict=True):
        exchange.snapshot()
        exchange.open(samples, [])
    meet_pieces(exchanges)
    for exchange in exchanges:
        exchange.load()


@pytest.mark.parametrize("side", ["cpu", "cuda"])
def test_a_step_back_leads_to_the_average_and_a_step_ahead_to_where_training_goes_on(side: str) -> None:
    models = [nn.Sequential(nn.Linear(33, 17), nn.BatchNorm1d(17), nn.Linear(17, 5)).cuda() for _ in SAMPLES]
    models[1].load_state_dict(models[0].state_dict())
    outer = Outer(kind="nesterov", momentum=0.5)
    exchanges = [
        Exchange(Arena(model), rank=rank, world_size=2, num_facts=0, outer=outer, device=side)
        for rank, model in enumerate(models)
    ]
    mean = torch.empty(0)
    for _ in range(3):
        for model in models:
            for parameter in model.parameters():
                parameter.data.add_(torch.randn_like(parameter))
        mean = 0.75 * vector(models[0]) + 0.25 * vector(models[1])
        average(exchanges)
    ahead = vector(models[0])
    for exchange in exchanges:
        exchange.move_to_average()
    torch.cuda.synchronize()
    torch.testing.assert_close(vector(models[0]), mean)
    assert torch.equal(vector(models[0]), vector(models[1]))
    for exchange in exchanges:
        exchange.move_to_lookahead()
    torch.cuda.synchronize()
    torch.testing.assert_close(vector(models[0]), ahead)
    assert torch.equal(vector(models[0]), vector(models[1]))


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
