"""The outer optimizer against a computation by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from outrider.average.outer import Outer
from outrider.errors import ConfigError


def steps(outer: Outer, deltas: list[float]) -> list[float]:
    ref, velocity = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    positions = []
    for delta in deltas:
        outer.step(ref, torch.tensor([delta], dtype=torch.float64), velocity)
        positions.append(float(ref))
    return positions


def test_nesterov_follows_the_hand_computation() -> None:
    # v: 1, then 0.5 * 1 + 2 = 2.5; x: 2 * (1 + 0.5 * 1) = 3, then 3 + 2 * (2 + 0.5 * 2.5) = 9.5
    assert steps(Outer(kind="nesterov", lr=2.0, momentum=0.5), [1.0, 2.0]) == [3.0, 9.5]


def test_slowmo_follows_the_hand_computation() -> None:
    # v: 1, then 2.5; x: 2 * 1 = 2, then 2 + 2 * 2.5 = 7
    assert steps(Outer(kind="slowmo", lr=2.0, momentum=0.5), [1.0, 2.0]) == [2.0, 7.0]


def test_auto_travels_as_far_per_sample_as_one_rank_alone(make_world: Callable) -> None:
    world = make_world(lambda: nn.Linear(1, 1, bias=False), outer=Outer(kind="nesterov"))
    for model in world.models:
        nn.init.zeros_(model.weight)
    for exchange in world.exchanges:
        exchange.reset_ref()
    for _ in range(60):
        # Each rank moves by 0.01 per sample: 0.3 on one, 0.1 on the other.
        for model, samples in zip(world.models, (30, 10), strict=True):
            model.weight.data.add_(0.01 * samples)
        before = world.values("weight")[0].item()
        world.average([30, 10])
    mean = 0.75 * 0.3 + 0.25 * 0.1
    travelled = world.values("weight")[0].item() - (before - 0.3)
    assert travelled == pytest.approx(mean / (0.75**2 + 0.25**2), rel=1e-3)
    assert travelled == pytest.approx(0.4, rel=1e-3)


@pytest.mark.parametrize(
    ("shares", "momentum"),
    [((1.0,), 0.0), ((0.75, 0.25), 1 - 0.625**2), ((0.5, 0.5), 0.75), ((0.25,) * 4, 0.75), ((0.125,) * 8, 0.875)],
)
def test_bold_goes_on_further_where_there_are_few_ranks(shares: tuple[float, ...], momentum: float) -> None:
    concentration = sum(share**2 for share in shares)
    outer = Outer(kind="nesterov", momentum="bold")
    assert outer.look_ahead(concentration) == pytest.approx(momentum)
    assert outer.look_ahead(torch.tensor(concentration)) == pytest.approx(momentum)


def test_none_moves_to_the_mean() -> None:
    ref = torch.zeros(2)
    Outer().step(ref, torch.tensor([1.0, -2.0]), None)
    assert ref.tolist() == [1.0, -2.0]


def test_a_window_without_samples_leaves_position_and_velocity() -> None:
    ref, velocity = torch.ones(1), torch.ones(1)
    Outer(kind="slowmo").step(ref, torch.zeros(1), velocity, is_moving=0.0)
    assert (ref.item(), velocity.item()) == (1.0, 1.0)


def test_the_outer_step_leaves_buffers_to_the_mean(make_world: Callable) -> None:
    world = make_world(lambda: nn.BatchNorm1d(2), outer=Outer(kind="nesterov", momentum=0.5))
    for model in world.models:
        model.running_mean.fill_(4.0)
        nn.init.constant_(model.weight, 3.0)
    world.average([1, 1])
    assert world.values("weight")[0].tolist() == [4.0, 4.0]
    assert world.values("running_mean")[0].tolist() == [4.0, 4.0]


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        Outer(kind="nestrov")
    assert str(caught.value) == (
        "unknown outer optimizer 'nestrov', expected one of none, nesterov, slowmo\nhint: did you mean 'nesterov'?"
    )


def test_a_momentum_of_one_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Outer(kind="slowmo", momentum=1.0)
    assert caught.value.message == "outer momentum must be >= 0 and < 1, got 1.0"
    assert caught.value.hint == '"auto" and "bold" follow the ranks\' shares of the samples'


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Outer(kind="slowmo", lr=0.0)
    assert str(caught.value) == "outer lr must be > 0, got 0.0\nhint: 1.0 keeps the averaged displacement as it is"
