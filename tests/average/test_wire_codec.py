"""Displacements in bfloat16 and in 8 bits: sizes, rounding, error feedback, equal bits on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from outrider.average.arena_layout import ArenaLayout
from outrider.average.exchange import Exchange
from outrider.average.layout_change import carried_over
from outrider.average.wire_codec import BLOCK, PacketForm


def linear() -> nn.Module:
    return nn.Linear(64, 64)


def with_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20))


def push(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


def there_and_back(wire: str, values: Tensor, num_parameters: int) -> Tensor:
    form = PacketForm(wire=wire, numel=values.numel(), num_parameters=num_parameters)
    packet = torch.zeros(form.num_bytes, dtype=torch.uint8)
    form.encode(values, packet)
    out = torch.full_like(values, torch.nan)
    form.decode(packet, out)
    return out


@pytest.mark.parametrize(("wire", "num_bytes"), [("bf16", 2 * 1000 + 28), ("int8", 4 * (4 + BLOCK) + 28)])
def test_a_packet_has_the_parameters_rounded_and_the_rest_in_full(wire: str, num_bytes: int) -> None:
    values = torch.randn(1007, generator=torch.Generator().manual_seed(0))
    assert PacketForm(wire=wire, numel=1007, num_parameters=1000).num_bytes == num_bytes
    back = there_and_back(wire, values, 1000)
    assert torch.equal(back[1000:], values[1000:])
    assert not torch.equal(back[:1000], values[:1000])
    largest = values[:1000].abs().max()
    assert (back - values).abs().max() <= (largest / 254 * 1.01 if wire == "int8" else largest * 2**-8)


@pytest.mark.parametrize("start", [0, 256, 768, 1000, 1003])
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_a_range_of_a_packet_is_the_range_of_its_values(wire: str, start: int) -> None:
    values = torch.randn(1007, generator=torch.Generator().manual_seed(1))
    form = PacketForm(wire=wire, numel=1007, num_parameters=1000)
    packet = torch.zeros(form.num_bytes, dtype=torch.uint8)
    form.encode(values, packet)
    whole, part = torch.empty(1007), torch.empty(1007 - start)
    form.decode(packet, whole)
    form.decode(packet, part, start=start)
    assert torch.equal(part, whole[start:])


def test_zeros_stay_zero_and_what_is_not_finite_is_not_hidden() -> None:
    values = torch.zeros(3 * BLOCK)
    values[BLOCK] = torch.inf
    values[2 * BLOCK] = torch.nan
    back = there_and_back("int8", values, values.numel())
    assert back[:BLOCK].eq(0).all()
    assert not back[BLOCK].isfinite()
    assert back[2 * BLOCK].isnan()


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize("build", [linear, with_buffers])
def test_all_ranks_get_the_same_bits(make_world: Callable, wire: str, build: Callable[[], nn.Module]) -> None:
    world = make_world(build, world_size=3, wire=wire)
    for number in range(4):
        for rank, model in enumerate(world.models):
            push(model, seed=10 * number + rank)
        world.average([1, 2, 3])
    first, *others = [exchange.arena.flats[torch.float32] for exchange in world.exchanges]
    assert all(torch.equal(first, other) for other in others)
    assert first.isfinite().all()


@pytest.mark.parametrize(("wire", "bound"), [("bf16", 2**-7), ("int8", 2**-5)])
def test_the_mean_is_close_to_that_of_fp32(make_world: Callable, wire: str, bound: float) -> None:
    found = {}
    for one in ("fp32", wire):
        torch.manual_seed(0)
        world = make_world(linear, wire=one)
        start = world.exchanges[0].arena.flats[torch.float32].clone()
        for rank, model in enumerate(world.models):
            push(model, seed=rank)
        world.average([3, 1])
        found[one] = world.exchanges[0].arena.flats[torch.float32] - start
    distance = (found[wire] - found["fp32"]).norm() / found["fp32"].norm()
    assert 0 < distance < bound


def test_error_feedback_sends_later_what_was_left_out(make_world: Callable) -> None:
    """A displacement of a hundredth of its block's largest is lost by rounding once, and not over many averages."""
    world = make_world(lambda: nn.Linear(BLOCK, 1, bias=False), wire="int8")
    start = world.values("weight")[0].clone()
    for _ in range(100):
        for model in world.models:
            with torch.no_grad():
                model.weight[0, 0] += 1.0
                model.weight[0, 1] += 0.001
        world.average([1, 1])
    moved = (world.values("weight")[0] - start)[0]
    assert moved[0].item() == pytest.approx(100.0, rel=1e-3)
    assert moved[1].item() == pytest.approx(0.1, abs=0.008)
    assert moved[1].item() > 0.05


def test_error_feedback_is_part_of_the_state(make_world: Callable) -> None:
    world = make_world(linear, wire="int8")
    for rank, model in enumerate(world.models):
        push(model, seed=rank)
    world.average([1, 1])
    saved = [exchange.state_dict() for exchange in world.exchanges]
    assert saved[0]["errors"]["torch.float32"].abs().max() > 0
    assert not torch.equal(saved[0]["errors"]["torch.float32"], saved[1]["errors"]["torch.float32"])
    resumed = make_world(linear, wire="int8")
    for model, old, exchange, state in zip(resumed.models, world.models, resumed.exchanges, saved, strict=True):
        model.load_state_dict(old.state_dict())
        exchange.reset_ref()
        exchange.load_state_dict(state)
    for one in (world, resumed):
        for rank, model in enumerate(one.models):
            push(model, seed=5 + rank)
        one.average([1, 1])
    assert torch.equal(world.values("weight")[0], resumed.values("weight")[0])


def test_error_feedback_of_what_stays_trained_outlives_a_freeze(make_world: Callable) -> None:
    world = make_world(lambda: nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)), wire="int8")
    for rank, model in enumerate(world.models):
        push(model, seed=rank)
    world.average([1, 1])
    exchange, model = world.exchanges[0], world.models[0]
    state, before = exchange.state_dict(), exchange.arena.layout
    model[0].requires_grad_(False)
    after = ArenaLayout(model, changing=before.changing)
    fresh = {"ref": {}, "velocity": {}, "errors": {"torch.float32": torch.zeros(after.parameter_numel[torch.float32])}}
    fresh["ref"]["torch.float32"] = torch.zeros(after.totals[torch.float32])
    errors = carried_over(state, before=before, after=after, fresh=fresh)["errors"]["torch.float32"]
    kept = state["errors"]["torch.float32"][-errors.numel() :]
    assert 0 < errors.numel() < state["errors"]["torch.float32"].numel()
    assert errors.abs().max() > 0
    assert torch.equal(errors, kept)


def test_an_exact_average_leaves_equal_ranks_as_they_are(make_world: Callable) -> None:
    world = make_world(linear, wire="int8")
    for model in world.models:
        push(model, seed=0)
    before = world.values("weight")[0]
    for exchange in world.exchanges:
        exchange.is_exact = True
    world.average([1, 1])
    torch.testing.assert_close(world.values("weight")[0], before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("wire", "bytes_per_parameter"), [("fp32", 4.0), ("bf16", 2.0), ("int8", 1.0 + 4 / BLOCK)])
def test_bytes_of_an_average(make_world: Callable, wire: str, bytes_per_parameter: float) -> None:
    world = make_world(lambda: nn.Linear(BLOCK, BLOCK, bias=False), wire=wire)
    exchange: Exchange = world.exchanges[0]
    num_slots = exchange.pieces[0].num_slots
    num_norms = 3 * 2
    assert exchange.num_bytes == bytes_per_parameter * BLOCK**2 + 4 * num_slots + 8 * num_norms


def test_float64_travels_as_it_is(make_world: Callable) -> None:
    world = make_world(lambda: nn.Linear(5, 3, dtype=torch.float64), wire="int8")
    assert [piece.form for piece in world.exchanges[0].pieces] == [None]
