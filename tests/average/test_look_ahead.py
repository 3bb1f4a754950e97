"""Between segments the model stands at the average, and not where the outer step looks ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from outrider.average.outer import Outer


def linear() -> nn.Module:
    return nn.Linear(5, 3)


def walk(model: nn.Module) -> Tensor:
    """A local step: a random move of every parameter, returned as one vector."""
    before = vector(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return vector(model) - before


def vector(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def three_averages(world: Any) -> Tensor:
    """Two of them give the outer step its velocity; returns the mean that the third has."""
    for _ in range(2):
        for model in world.models:
            walk(model)
        world.average([3, 1])
    for model in world.models:
        walk(model)
    mean = 0.75 * vector(world.models[0]) + 0.25 * vector(world.models[1])
    world.average([3, 1])
    return mean


def with_two_dtypes() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).double())


@pytest.mark.parametrize("build", [linear, with_two_dtypes])
@pytest.mark.parametrize("momentum", [0.5, "auto"])
def test_a_step_back_leads_from_the_look_ahead_to_the_mean(
    make_world: Callable, build: Callable[[], nn.Module], momentum: float | Literal["auto"]
) -> None:
    world = make_world(build, outer=Outer(kind="nesterov", momentum=momentum))
    mean = three_averages(world)
    ahead = vector(world.models[0])
    buffers = [buffer.clone() for buffer in world.models[0].buffers()]
    assert not torch.allclose(ahead, mean, atol=0.1)
    for exchange in world.exchanges:
        exchange.move_to_average()
    # Half of the model is in float32, and so is the precision.
    torch.testing.assert_close(vector(world.models[0]).float(), mean.float())
    assert torch.equal(vector(world.models[0]), vector(world.models[1]))
    for exchange in world.exchanges:
        exchange.move_to_lookahead()
    torch.testing.assert_close(vector(world.models[0]), ahead)
    assert torch.equal(vector(world.models[0]), vector(world.models[1]))
    assert all(torch.equal(*pair) for pair in zip(buffers, world.models[0].buffers(), strict=True))


def test_a_step_back_is_the_same_after_an_average_without_samples(make_world: Callable) -> None:
    world = make_world(linear, outer=Outer(kind="nesterov", momentum=0.5))
    mean = three_averages(world)
    world.average([0, 0])
    for exchange in world.exchanges:
        exchange.move_to_average()
    # Half of the model is in float32, and so is the precision.
    torch.testing.assert_close(vector(world.models[0]).float(), mean.float())


@pytest.mark.parametrize("outer", [Outer(), Outer(kind="slowmo", momentum=0.5)])
def test_without_a_look_ahead_nothing_is_stepped_back(make_world: Callable, outer: Outer) -> None:
    world = make_world(linear, outer=outer)
    three_averages(world)
    before = vector(world.models[0])
    for exchange in world.exchanges:
        exchange.move_to_average()
    assert torch.equal(vector(world.models[0]), before)


def test_what_a_user_changes_between_steps_back_and_ahead_stays(make_world: Callable) -> None:
    world = make_world(linear, outer=Outer(kind="nesterov", momentum=0.5))
    three_averages(world)
    for exchange in world.exchanges:
        exchange.move_to_average()
    mean = vector(world.models[0])
    moves = [walk(model) for model in world.models]
    for exchange in world.exchanges:
        exchange.move_to_lookahead()
    own = [vector(model) - move for model, move in zip(world.models, moves, strict=True)]
    torch.testing.assert_close(own[0], own[1])
    assert not torch.allclose(own[0], mean, atol=0.1)


def test_saved_state_knows_what_lies_ahead(make_world: Callable) -> None:
    kept, resumed = (make_world(linear, outer=Outer(kind="nesterov", momentum=0.5)) for _ in range(2))
    three_averages(kept)
    for exchange in kept.exchanges:
        exchange.move_to_average()
    for old, new in zip(kept.exchanges, resumed.exchanges, strict=True):
        new.load_state_dict(old.state_dict())
        new.load()
    for world in (kept, resumed):
        for exchange in world.exchanges:
            exchange.move_to_lookahead()
    assert torch.equal(vector(kept.models[0]), vector(resumed.models[0]))
    assert torch.equal(vector(kept.models[1]), vector(resumed.models[1]))


def test_a_state_that_does_not_know_what_lies_ahead_was_taken_there(make_world: Callable) -> None:
    world = make_world(linear, outer=Outer(kind="nesterov", momentum=0.5))
    three_averages(world)
    before = vector(world.models[0])
    state = {name: value for name, value in world.exchanges[0].state_dict().items() if name != "ahead"}
    world.exchanges[0].load_state_dict(state)
    world.exchanges[0].move_to_lookahead()
    assert torch.equal(vector(world.models[0]), before)
