"""What averages keep on a rank's device, in bytes per trained parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.average.arena import Arena
from outrider.average.exchange import Exchange
from outrider.average.gradients import GradientExchange
from outrider.average.outer import Outer

TRAINED = 1024 * 1024


def adapted() -> nn.Module:
    """A million trained parameters beside four million frozen ones."""
    trained, frozen = nn.Linear(1024, 1024, bias=False), nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16)
    return nn.Sequential(trained, frozen.requires_grad_(False))


def per_parameter(exchange: Exchange) -> float:
    """Without the scratch of one piece, which does not grow with the model."""
    scratch = max(piece.num_bytes for piece in exchange.pieces)
    return (sum(part.num_bytes for part in exchange.parts) - scratch) / TRAINED


@pytest.mark.parametrize(("outer", "bytes_more"), [("none", 0), ("nesterov", 4)])
def test_a_blocking_average_keeps_the_common_point_alone(outer: str, bytes_more: int) -> None:
    exchange = Exchange(Arena(adapted()), rank=0, world_size=2, num_facts=12, outer=Outer(kind=outer))
    assert per_parameter(exchange) <= 4.01 + bytes_more


@pytest.mark.parametrize(("outer", "bytes_more"), [("none", 0), ("nesterov", 4)])
def test_an_average_in_the_background_keeps_a_snapshot_as_well(outer: str, bytes_more: int) -> None:
    exchange = Exchange(Arena(adapted()), rank=0, world_size=2, num_facts=12, outer=Outer(kind=outer))
    exchange.snapshot()
    assert 7.9 + bytes_more <= per_parameter(exchange) <= 8.01 + bytes_more


def test_shared_steps_keep_one_copy_of_the_gradients() -> None:
    exchange = GradientExchange(Arena(adapted()), rank=0, world_size=2, num_facts=12)
    assert exchange.num_bytes / TRAINED <= 4.01


def test_the_arena_has_nothing_of_what_is_frozen() -> None:
    arena = Arena(adapted())
    assert {dtype: flat.nbytes for dtype, flat in arena.flats.items()} == {torch.float32: 4 * TRAINED}
