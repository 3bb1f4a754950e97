"""The arithmetic of a wire, piece by piece."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.average import exchange as exchange_module
from outrider.average.arena import Arena
from outrider.average.exchange import Exchange
from outrider.average.outer import Outer
from outrider.average.transport.collective import meet_pieces
from outrider.average.wire import MeanStep, Wire
from outrider.average.wire_plan import plan_wires


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 3, dtype=torch.bfloat16))


def wire_of(model: nn.Module) -> Wire:
    (plan,) = plan_wires(Arena(model), None)
    wire = Wire(plan, arena_device=torch.device("cpu"), spans=plan.cut(2**20))
    wire.restart()
    return wire


def settle(wire: Wire, *, sum_with: float, total: int) -> None:
    """One average in which the other ranks bring `sum_with` to every element."""
    (span,) = wire.plan.cut(2**20)
    payload = torch.zeros(span.numel + span.num_extra)
    wire.pack(span, payload, samples=1, is_live=False)
    payload.add_(sum_with)
    step = MeanStep(reciprocal=1.0 / total, is_moving=1.0, concentration=1.0, outer=Outer())
    wire.settle(span, [payload[:3], payload[3:]], step, is_live=False, counts=True)


def test_the_snapshot_is_of_the_time_it_was_taken() -> None:
    model = nn.Linear(4, 4, bias=False)
    wire = wire_of(model)
    nn.init.ones_(model.weight)
    wire.take_snapshot()
    nn.init.zeros_(model.weight)
    assert wire.snapshot.unique().tolist() == [1.0]


def test_the_correction_takes_the_place_of_the_snapshot() -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(model.weight)
    wire = wire_of(model)
    nn.init.ones_(model.weight)
    wire.take_snapshot()
    nn.init.constant_(model.weight, 11.0)
    settle(wire, sum_with=3.0, total=2)
    assert wire.ref.unique().tolist() == [2.0]
    assert wire.snapshot.unique().tolist() == [1.0]
    wire.add_correction()
    assert model.weight.unique().tolist() == [12.0]


def test_variances_of_half_precision_keep_their_floor() -> None:
    model = nn.BatchNorm1d(4, affine=False, dtype=torch.bfloat16)
    model.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    wire = wire_of(model)
    wire.take_snapshot()
    model.running_var.fill_(0.25)
    settle(wire, sum_with=-0.75, total=1)
    wire.add_correction()
    assert model.running_var.tolist() == [0.25] * 4


def test_a_blocking_average_needs_no_snapshot() -> None:
    model = nn.Linear(4, 4, bias=False)
    exchange = Exchange(Arena(model), rank=0, world_size=1, num_facts=0)
    exchange.stage_live()
    exchange.open(1, [])
    meet_pieces([exchange])
    (wire,) = exchange.parts
    assert wire._snapshot is None


def test_statistics_are_never_cut() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 8, bias=False))
    model.register_buffer("table", torch.zeros(64))
    (plan,) = plan_wires(Arena(model), None)
    spans = plan.cut(24)
    (with_norms,) = [span for span in spans if span.norms]
    norm = with_norms.norms[0]
    assert with_norms.start <= norm.mean.start < norm.variance.stop <= with_norms.stop
    assert [span.stop for span in spans[:-1]] == [span.start for span in spans[1:]]
    assert (spans[0].start, spans[-1].stop) == (0, plan.num_body)


@pytest.mark.parametrize("outer", [Outer(), Outer(kind="nesterov", momentum=0.5)])
def test_small_pieces_give_the_bits_of_one(monkeypatch: pytest.MonkeyPatch, outer: Outer) -> None:
    def averaged(piece_numel: int) -> list[torch.Tensor]:
        monkeypatch.setattr(exchange_module, "PIECE_NUMEL", piece_numel)
        torch.manual_seed(0)
        models = [
            nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 3, dtype=torch.bfloat16)) for _ in "ab"
        ]
        models[1].load_state_dict(models[0].state_dict())
        exchanges = [
            Exchange(Arena(model), rank=rank, world_size=2, num_facts=0, outer=outer)
            for rank, model in enumerate(models)
        ]
        for number in range(3):
            for exchange in exchanges:
                for flat in exchange.arena.flats.values():
                    flat.add_(torch.rand(flat.shape).to(flat.dtype))
                exchange.stage() if number % 2 else exchange.stage_live()
                exchange.open(exchange.rank + 1, [])
            meet_pieces(exchanges)
            for exchange in exchanges:
                exchange.add_correction() if number == 1 else exchange.load()
        return [flat.clone() for exchange in exchanges for flat in exchange.arena.flats.values()]

    whole, cut = averaged(2**20), averaged(100)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))
    assert torch.equal(whole[0], whole[len(whole) // 2])
