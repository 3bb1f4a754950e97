"""The arithmetic of an average: means, drift, statistics, corrections, facts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from outrider.average.arena import Arena
from outrider.average.exchange import Exchange
from outrider.average.outer import Outer
from outrider.average.transport.collective import meet_pieces
from outrider.errors import DataError


def linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Linear(5, 3, dtype=dtype)


def set_all(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def walk(model: nn.Module) -> Tensor:
    """A local step: a random move of every parameter, returned as one vector."""
    moves = [torch.randn_like(parameter) for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.add_(move)
    return torch.cat([move.flatten() for move in moves])


def vector(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def bits(tensor: Tensor) -> list[int]:
    words: list[int] = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16).flatten().tolist()
    return words


def test_the_mean_is_weighted_by_samples(make_world: Callable) -> None:
    world = make_world(linear)
    set_all(world.models[0], 1.0)
    set_all(world.models[1], 5.0)
    world.average([30, 10])
    torch.testing.assert_close(world.values("weight"), [torch.full((3, 5), 2.0)] * 2)


def test_a_rank_without_samples_takes_the_mean(make_world: Callable) -> None:
    world = make_world(linear)
    set_all(world.models[0], 1.0)
    set_all(world.models[1], math.nan)
    world.average([30, 0])
    torch.testing.assert_close(world.values("weight")[1], torch.ones(3, 5))


def test_without_any_samples_the_common_point_stays(make_world: Callable) -> None:
    world = make_world(linear, outer=Outer(kind="nesterov"))
    set_all(world.models[0], 1.0)
    set_all(world.models[1], 2.0)
    world.average([1, 1])
    before = [world.exchanges[0].state_dict(), world.values("weight")[0]]
    settled = world.average([0, 0])
    after = world.exchanges[0].state_dict()
    assert torch.equal(world.values("weight")[0], before[1])
    assert torch.equal(after["velocity"]["torch.float32"], before[0]["velocity"]["torch.float32"])
    assert settled[0].total_samples == 0
    assert settled[0].drift == 0.0


def test_facts_of_every_rank_reach_every_rank(make_world: Callable) -> None:
    world = make_world(linear, world_size=3)
    settled = world.average([1, 2, 3])
    assert [one.facts for one in settled] == [((0.0,), (1.0,), (2.0,))] * 3


def test_sample_counts_beyond_float32_are_exact(make_world: Callable) -> None:
    world = make_world(linear)
    settled = world.average([2**24 + 1, 2**33 + 3])
    assert settled[0].total_samples == 2**24 + 2**33 + 4


def test_facts_hold_48_bits_and_infinities() -> None:
    exchange = Exchange(Arena(linear()), rank=0, world_size=1, num_facts=4)
    exchange.snapshot()
    exchange.open(1, [2.0**47 + 1, -0.1, math.inf, 1e300])
    large, small, infinite, huge = meet_pieces([exchange])[0].facts[0]
    assert large == 2.0**47 + 1
    assert small == pytest.approx(-0.1, rel=1e-14)
    assert infinite == math.inf
    assert huge == math.inf


def test_integer_counters_take_the_maximum(make_world: Callable) -> None:
    world = make_world(lambda: nn.BatchNorm1d(3))
    world.models[0].num_batches_tracked.fill_(2**40)
    world.models[1].num_batches_tracked.fill_(7)
    world.average([1, 1])
    assert [int(model.num_batches_tracked) for model in world.models] == [2**40, 2**40]


def test_a_corrected_counter_keeps_what_was_counted_meanwhile(make_world: Callable) -> None:
    world = make_world(lambda: nn.BatchNorm1d(3))
    world.models[0].num_batches_tracked.fill_(10)
    world.models[1].num_batches_tracked.fill_(4)
    world.begin([1, 1])
    world.models[1].num_batches_tracked += 3
    world.settle()
    world.exchanges[1].add_correction()
    assert int(world.models[1].num_batches_tracked) == 13


def test_bool_buffers_take_the_maximum(make_world: Callable) -> None:
    def build() -> nn.Module:
        model = linear()
        model.register_buffer("is_set", torch.tensor([False, False]))
        return model

    world = make_world(build)
    world.models[1].is_set[0] = True
    world.average([1, 1])
    assert world.models[0].is_set.tolist() == [True, False]


def test_batch_norm_variances_merge_as_the_variance_of_the_mixture(make_world: Callable) -> None:
    world = make_world(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(5)).double())
    for model in world.models:
        for norm in model:
            norm.running_mean.normal_(3.0, 2.0)
            norm.running_var.uniform_(0.5, 2.0)
    weights = (0.7, 0.3)
    means, variances = world.values("1.running_mean"), world.values("1.running_var")
    mean = sum(w * m for w, m in zip(weights, means, strict=True))
    expected = sum(w * (v + (m - mean) ** 2) for w, m, v in zip(weights, means, variances, strict=True))
    world.average([70, 30])
    torch.testing.assert_close(world.models[0][1].running_mean, mean)
    torch.testing.assert_close(world.models[0][1].running_var, expected)
    assert torch.equal(world.models[1][1].running_var, world.models[0][1].running_var)


def test_a_corrected_variance_stays_above_the_smaller_of_its_parents(make_world: Callable) -> None:
    world = make_world(lambda: nn.BatchNorm1d(1))
    world.models[0].running_var.fill_(1.0)
    world.models[1].running_var.fill_(0.1)
    world.begin([0, 1])
    world.models[0].running_var.fill_(0.5)
    world.settle()
    world.exchanges[0].add_correction()
    torch.testing.assert_close(world.models[0].running_var, torch.tensor([0.1]))


def test_correction_keeps_every_local_step(make_world: Callable) -> None:
    world = make_world(lambda: linear(torch.float64))
    start, travelled = vector(world.models[0]), torch.zeros(18, dtype=torch.float64)
    late = [torch.zeros_like(travelled)] * 2
    for samples in ([3, 1], [2, 5], [4, 4], [1, 9]):
        walks = [before + walk(model) for before, model in zip(late, world.models, strict=True)]
        travelled += sum(own / sum(samples) * walked for own, walked in zip(samples, walks, strict=True))
        world.begin(samples)
        # Steps after the snapshot belong to the window after: they stay now, and are averaged then.
        late = [walk(model) + walk(model) for model in world.models]
        world.settle()
        for exchange in world.exchanges:
            exchange.add_correction()
    for model, own in zip(world.models, late, strict=True):
        torch.testing.assert_close(vector(model), start + travelled + own, rtol=0, atol=1e-12)


def test_frozen_parameters_stay_exact_for_100_averages(make_world: Callable) -> None:
    world = make_world(linear)
    frozen = bits(world.values("weight")[0])
    for _ in range(100):
        with torch.no_grad():
            world.models[0].bias.normal_()
            world.models[1].bias.normal_()
        world.average([17, 5])
    assert bits(world.values("weight")[0]) == frozen
    assert bits(world.values("weight")[1]) == frozen


def test_all_ranks_are_bit_identical_after_a_load(make_world: Callable) -> None:
    world = make_world(linear, world_size=3)
    for model in world.models:
        walk(model)
    world.average([7, 11, 13])
    assert bits(world.values("weight")[0]) == bits(world.values("weight")[1]) == bits(world.values("weight")[2])


def test_bfloat16_is_averaged_in_float32(make_world: Callable) -> None:
    world = make_world(lambda: linear(torch.bfloat16))
    set_all(world.models[0], 1.0)
    set_all(world.models[1], 1.0 + 2**-7)
    for _ in range(10):
        world.average([3, 1])
    # The exact mean, 1 + 2**-9, rounds to 1; averaged in bfloat16 the sum would not even hold 3 * 1 + 1 + 2**-7.
    assert [piece.dtype for piece in world.exchanges[0].pieces] == [torch.float32]
    assert world.values("weight")[0].unique().tolist() == [1.0]


def test_mixed_dtypes_travel_in_two_wires(make_world: Callable) -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    world = make_world(lambda: nn.Sequential(*(linear(dtype) for dtype in dtypes)))
    set_all(world.models[0], 2.0)
    set_all(world.models[1], 4.0)
    settled = world.average([1, 1])
    assert [piece.dtype for piece in world.exchanges[0].pieces] == [torch.float64, torch.float32]
    torch.testing.assert_close(vector(world.models[1]), torch.full((72,), 3.0, dtype=torch.float64))
    assert settled[0].drift == pytest.approx(1 / 3)


def test_drift_is_the_spread_around_the_mean_relative_to_it(make_world: Callable) -> None:
    world = make_world(lambda: linear(torch.float64))
    for model in world.models:
        walk(model)
    first, second = (vector(model) for model in world.models)
    mean = 0.25 * first + 0.75 * second
    spread = 0.25 * (first - mean).square().sum() + 0.75 * (second - mean).square().sum()
    settled = world.average([1, 3])
    assert settled[0].drift == pytest.approx(float(spread.sqrt() / mean.norm()), rel=1e-9)
    assert settled[1].drift == settled[0].drift


def test_drift_ignores_buffers(make_world: Callable) -> None:
    world = make_world(lambda: nn.BatchNorm1d(3))
    world.models[1].running_mean.fill_(9.0)
    assert world.average([1, 1])[0].drift == 0.0


def test_a_rank_that_diverged_shows_as_infinite_drift(make_world: Callable) -> None:
    world = make_world(linear)
    set_all(world.models[1], math.inf)
    assert world.average([1, 1])[0].drift == math.inf


def test_a_mask_of_infinities_survives(make_world: Callable) -> None:
    def build() -> nn.Module:
        model = linear()
        model.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        return model

    world = make_world(build)
    mask = world.values("mask")[0]
    world.average([1, 2])
    world.begin([1, 2])
    world.settle()
    world.exchanges[0].add_correction()
    assert torch.equal(world.values("mask")[0], mask)
    assert torch.equal(world.values("mask")[1], mask)


def test_one_rank_alone_keeps_every_bit(make_world: Callable) -> None:
    world = make_world(linear, world_size=1)
    walk(world.models[0])
    before = bits(world.values("weight")[0])
    settled = world.average([7])
    assert bits(world.values("weight")[0]) == before
    assert settled[0].drift == 0.0


def test_buffers_are_reused(make_world: Callable) -> None:
    world = make_world(linear)
    world.average([1, 1])
    before = [part.snapshot.data_ptr() for part in world.exchanges[0].parts]
    world.average([1, 1])
    assert [part.snapshot.data_ptr() for part in world.exchanges[0].parts] == before


def test_reset_makes_the_arena_the_common_point(make_world: Callable) -> None:
    world = make_world(linear)
    for model, exchange in zip(world.models, world.exchanges, strict=True):
        set_all(model, 1e6)
        exchange.reset_ref()
        set_all(model, 1e6 + 0.0625)
    world.average([3, 5])
    assert world.values("bias")[0].tolist() == [1e6 + 0.0625] * 3


def test_saved_state_continues_the_outer_momentum(make_world: Callable) -> None:
    kept, resumed = (make_world(linear, outer=Outer(kind="nesterov", momentum=0.5)) for _ in range(2))
    for world in (kept, resumed):
        for model in world.models:
            set_all(model, 0.0)
        for exchange in world.exchanges:
            exchange.reset_ref()
    set_all(kept.models[0], 1.0)
    kept.average([1, 0])
    for old, new in zip(kept.exchanges, resumed.exchanges, strict=True):
        new.load_state_dict(old.state_dict())
        new.load()
    for world in (kept, resumed):
        set_all(world.models[0], 2.0)
        world.average([1, 0])
    assert torch.equal(vector(kept.models[0]), vector(resumed.models[0]))


def test_the_state_of_another_model_is_refused() -> None:
    exchange = Exchange(Arena(linear()), rank=0, world_size=1, num_facts=0)
    other = Exchange(Arena(nn.Linear(2, 2)), rank=0, world_size=1, num_facts=0)
    with pytest.raises(DataError, match="the saved average belongs to another model: layout") as caught:
        exchange.load_state_dict(other.state_dict())
    assert caught.value.hint == "resume with the model that wrote the checkpoint"
