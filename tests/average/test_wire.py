"""The buffers of a wire whose arena is on another device: everything passes over the bridge."""

from __future__ import annotations

import torch
from torch import nn

from outrider.average import Arena, Outer
from outrider.average.wire import Wire, plan_wires

# Equal memory, unequal names: what makes a bridge on a machine without a second device.
HERE, THERE = torch.device("cpu"), torch.device("cpu", 0)


def bridged(model: nn.Module) -> Wire:
    (plan,) = plan_wires(Arena(model), None)
    wire = Wire(plan, arena_device=HERE, device=THERE, num_slots=0)
    wire.stage()
    wire.fetch()
    wire.restart()
    return wire


def exchange(wire: Wire, *, sum_with: torch.Tensor | float, total: int) -> None:
    """One average in which the other ranks bring `sum_with` to every element."""
    wire.displace()
    wire.scale(1)
    wire.summed.add_(sum_with)
    scalar = torch.tensor(float(total), dtype=torch.float64)
    one = torch.ones_like(scalar)
    wire.apply(total=scalar, is_moving=one, concentration=one, outer=Outer(), parts=torch.zeros(256).double())


def test_the_mean_comes_back_over_the_bridge() -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(model.weight)
    wire = bridged(model)
    nn.init.ones_(model.weight)
    wire.stage()
    wire.fetch()
    exchange(wire, sum_with=3.0, total=2)
    wire.load()
    assert wire.is_bridged
    assert model.weight.unique().tolist() == [2.0]


def test_the_snapshot_is_of_the_time_it_was_staged() -> None:
    model = nn.Linear(4, 4, bias=False)
    wire = bridged(model)
    nn.init.ones_(model.weight)
    wire.stage()
    nn.init.zeros_(model.weight)
    wire.fetch()
    assert wire.snapshot.unique().tolist() == [1.0]


def test_the_correction_comes_back_over_the_bridge() -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(model.weight)
    wire = bridged(model)
    nn.init.ones_(model.weight)
    wire.stage()
    wire.fetch()
    nn.init.constant_(model.weight, 11.0)
    exchange(wire, sum_with=3.0, total=2)
    wire.prepare_correction()
    wire.add_correction()
    assert model.weight.unique().tolist() == [12.0]


def test_variances_of_half_precision_keep_their_floor() -> None:
    model = nn.BatchNorm1d(4, affine=False, dtype=torch.bfloat16)
    model.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    wire = bridged(model)
    wire.stage()
    wire.fetch()
    model.running_var.fill_(0.25)
    exchange(wire, sum_with=-0.75, total=1)
    wire.prepare_correction()
    wire.add_correction()
    assert model.running_var.tolist() == [0.25] * 4
