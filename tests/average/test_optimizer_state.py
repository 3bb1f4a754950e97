"""Optimizer state that joins the average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from outrider.average.arena import Arena
from outrider.average.optimizer_state import OptimizerArena
from outrider.average.outer import Outer
from outrider.errors import ConfigError


def linear() -> nn.Module:
    return nn.Linear(3, 2)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float) -> torch.optim.Optimizer:
    model(torch.full((4, 3), scale)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_moments_are_averaged_by_samples(make_world: Callable) -> None:
    world = make_world(linear)
    optimizers = [stepped(model, torch.optim.Adam(model.parameters()), 1.0 + r) for r, model in enumerate(world.models)]
    states = [optimizer.state[model.weight] for optimizer, model in zip(optimizers, world.models, strict=True)]
    expected = {key: 0.75 * states[0][key] + 0.25 * states[1][key] for key in ("exp_avg", "exp_avg_sq")}
    for exchange, optimizer in zip(world.exchanges, optimizers, strict=True):
        exchange.attach(OptimizerArena(optimizer))
    world.average([3, 1])
    for state in states:
        torch.testing.assert_close({key: state[key] for key in expected}, expected)


def test_momentum_is_not_moved_by_the_outer_step(make_world: Callable) -> None:
    world = make_world(linear, outer=Outer(kind="nesterov", momentum=0.9))
    optimizers = [stepped(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), 1.0) for model in world.models]
    for exchange, optimizer in zip(world.exchanges, optimizers, strict=True):
        exchange.attach(OptimizerArena(optimizer))
    world.average([1, 1])
    assert optimizers[0].state[world.models[0].weight]["momentum_buffer"].unique().tolist() == [4.0]


def test_drift_ignores_optimizer_state(make_world: Callable) -> None:
    world = make_world(linear)
    for rank, (model, exchange) in enumerate(zip(world.models, world.exchanges, strict=True)):
        optimizer = stepped(model, torch.optim.SGD(model.parameters(), 0.0, momentum=0.9), float(rank))
        exchange.attach(OptimizerArena(optimizer))
    assert world.average([1, 1])[0].drift == 0.0


def test_attaching_keeps_the_common_point(make_world: Callable) -> None:
    world = make_world(linear)
    start = world.values("weight")[0]
    for model, exchange in zip(world.models, world.exchanges, strict=True):
        exchange.attach(OptimizerArena(stepped(model, torch.optim.Adam(model.parameters()), 1.0)))
    assert torch.equal(world.exchanges[0].parts[0].ref[:6].view(2, 3), start)


@pytest.fixture
def attached(make_world: Callable) -> Callable:
    """A world of two whose Adam state has taken part in one average."""

    def make(**adam: Any) -> Any:
        world = make_world(linear)
        for rank, (model, exchange) in enumerate(zip(world.models, world.exchanges, strict=True)):
            optimizer = stepped(model, torch.optim.Adam(model.parameters(), **adam), 1.0 + rank / 3)
            exchange.attach(OptimizerArena(optimizer))
        world.average([3, 1])
        return world

    return make


def test_saved_state_has_the_common_point_of_the_optimizer(attached: Callable) -> None:
    saved, resumed = attached(), attached()
    ref = resumed.exchanges[0].parts[0].ref
    ref.fill_(-1.0)
    resumed.exchanges[0].load_state_dict(saved.exchanges[0].state_dict())
    assert torch.equal(ref, saved.exchanges[0].parts[0].ref)


def test_a_saved_point_of_another_optimizer_gives_the_parameters_only(attached: Callable) -> None:
    saved, resumed = attached(amsgrad=True), attached()
    ref = resumed.exchanges[0].parts[0].ref
    num_arena = resumed.exchanges[0].parts[0].plan.num_arena
    ref.fill_(-1.0)
    resumed.exchanges[0].load_state_dict(saved.exchanges[0].state_dict())
    assert torch.equal(ref[:num_arena], saved.exchanges[0].parts[0].ref[:num_arena])
    assert ref[num_arena:].unique().tolist() == [-1.0]


def test_steps_go_on_in_the_flat_tensor() -> None:
    model = linear()
    Arena(model)
    optimizer = stepped(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.5), 1.0)
    arena = OptimizerArena(optimizer)
    stepped(model, optimizer, 1.0)
    assert arena.flats[torch.float32][:6].tolist() == [6.0] * 6


def test_a_corrected_second_moment_stays_above_the_smaller_of_its_parents(make_world: Callable) -> None:
    world = make_world(linear)
    optimizers = [stepped(model, torch.optim.Adam(model.parameters()), 1.0) for model in world.models]
    squares = [o.state[m.weight]["exp_avg_sq"] for o, m in zip(optimizers, world.models, strict=True)]
    for exchange, optimizer in zip(world.exchanges, optimizers, strict=True):
        exchange.attach(OptimizerArena(optimizer))
    squares[0].fill_(1.0)
    squares[1].fill_(0.25)
    world.begin([0, 1])
    squares[0].fill_(0.5)
    world.settle()
    world.exchanges[0].add_correction()
    assert squares[0].unique().tolist() == [0.25]


def test_state_that_was_loaded_anew_is_taken_back() -> None:
    model = linear()
    optimizer = stepped(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.5), 1.0)
    arena = OptimizerArena(optimizer)
    optimizer.state[model.weight]["momentum_buffer"] = torch.full((2, 3), 8.0)
    arena.reclaim()
    assert arena.flats[torch.float32][:6].tolist() == [8.0] * 6


def test_a_parameter_without_state_keeps_its_place() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    model.weight.grad = torch.ones(2, 3)
    optimizer.step()
    assert OptimizerArena(optimizer).flats[torch.float32].numel() == 16 + 2


def test_an_optimizer_without_state_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        OptimizerArena(torch.optim.SGD(linear().parameters(), 0.1))
    assert str(caught.value) == (
        "SGD holds no state to average\n"
        "hint: leave average_optimizer out, or use an optimizer with momentum and average after its first step"
    )
