"""What a run needs of memory, counted before anything is allocated, and refused where it cannot fit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outrider
from outrider.average.arena import Arena
from outrider.average.average_memory import average_bytes
from outrider.average.exchange import Exchange
from outrider.average.gradients import GradientExchange
from outrider.average.outer import Outer
from outrider.policy.policies import policy_spec
from outrider.rank.memory_needs import MemoryNeeds, memory_words, refuse_too_large
from outrider.replica.optimizer_memory import state_bytes

TRAINED = 1024 * 1024


def adapted() -> nn.Module:
    """A million trained parameters beside four million frozen ones."""
    trained, frozen = nn.Linear(1024, 1024, bias=False), nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16)
    return nn.Sequential(trained, frozen.requires_grad_(False))


def allocated(policy: str, outer: Outer, wire: str) -> int:
    """Without the scratch of one piece, which does not grow with the model."""
    spec, arena = policy_spec(policy), Arena(adapted())
    exchange = Exchange(arena, rank=0, world_size=2, num_facts=12, outer=outer, wire=wire)
    if not (spec.shares_steps or spec.blocks_at_averages):
        exchange.snapshot()
    scratch = max(piece.sum_numel for piece in exchange.pieces) * 4
    kept = sum(part.num_bytes for part in exchange.parts) - scratch
    return kept + (GradientExchange(arena, rank=0, world_size=2, num_facts=12).num_bytes if spec.shares_steps else 0)


@pytest.mark.parametrize("policy", ["auto", "sync", "balanced", "cadence", "async"])
@pytest.mark.parametrize("outer", ["none", "nesterov"])
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_the_needs_of_averages_are_what_they_allocate(policy: str, outer: str, wire: str) -> None:
    told = average_bytes(Arena(adapted()), policy_spec(policy), outer=Outer(kind=outer), wire=wire, world_size=2)
    assert told.total == pytest.approx(allocated(policy, Outer(kind=outer), wire), rel=0.01)


@pytest.mark.parametrize(
    ("policy", "per_parameter"), [("sync", 8), ("balanced", 8), ("auto", 8), ("cadence", 4), ("async", 8)]
)
def test_averages_take_so_many_bytes_per_trained_parameter(policy: str, per_parameter: int) -> None:
    told = average_bytes(Arena(adapted()), policy_spec(policy), outer=Outer(), wire="fp32", world_size=2)
    assert told.total == per_parameter * TRAINED


@pytest.mark.parametrize(
    ("policy", "per_parameter"), [("sync", 4), ("balanced", 4), ("auto", 4), ("cadence", 4), ("async", 8)]
)
def test_gradients_in_pieces_take_no_memory_of_their_own(policy: str, per_parameter: int) -> None:
    told = average_bytes(
        Arena(adapted()), policy_spec(policy), outer=Outer(), wire="fp32", world_size=2, in_pieces=True
    )
    assert told.total == per_parameter * TRAINED


def test_one_rank_needs_nothing_for_averages() -> None:
    assert average_bytes(Arena(adapted()), policy_spec("sync"), outer=Outer(), wire="fp32", world_size=1).total == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.Adadelta(p),
    ],
)
def test_the_state_of_an_optimizer_is_known_before_its_first_step(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = nn.Linear(64, 64)
    optimizer = make(model.parameters())
    told = state_bytes(optimizer)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert told == pytest.approx(sum(value.nbytes for value in kept), abs=64)


def test_the_state_of_a_strange_optimizer_is_not_known() -> None:
    class Own(torch.optim.SGD):
        pass

    assert state_bytes(Own(nn.Linear(1, 1).parameters(), 0.1)) is None


NEEDS = MemoryNeeds(
    device="cuda:0",
    place="here cuda:0",
    model=4 * 10**9,
    gradients=4 * 10**9,
    optimizer=8 * 10**9,
    optimizer_there=0,
    averages=12 * 10**9,
    later=0,
    saved_by_cadence=4 * 10**9,
    saved_without_outer=0,
    available=30 * 10**9,
    has_limit=False,
)


def test_a_rank_that_cannot_fit_is_refused_with_numbers_and_ways_out() -> None:
    with pytest.raises(outrider.DeviceError) as caught:
        refuse_too_large([NEEDS, replace(NEEDS, device="cuda:1:8GiB", available=8 * 10**9, has_limit=True)])
    assert str(caught.value) == (
        "rank 1 (cuda:1:8GiB) needs 24 GB beside its model of 4 GB, before any activation: gradients 4 GB, "
        "optimizer state 8 GB, averages 12 GB; 8 GB are left of its limit\n"
        'hint: policy="cadence" needs 4 GB less; an optimizer with less state, or fewer trained parameters '
        "(requires_grad_(False)), needs less; raise the limit of the device"
    )


def test_ranks_of_one_card_share_what_is_free() -> None:
    refuse_too_large([NEEDS, replace(NEEDS, place="here cuda:1")])
    with pytest.raises(outrider.DeviceError, match="30 GB are free, and 2 ranks share them"):
        refuse_too_large([NEEDS, NEEDS])


def test_a_small_model_is_not_worth_a_word() -> None:
    assert memory_words([NEEDS]) == "28 GB of memory per rank before activations"
    assert memory_words([replace(NEEDS, model=0, gradients=0, optimizer=0, averages=1000)]) is None


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def train(folder: Path, devices: str) -> None:
    model = nn.Linear(8192, 4096)  # 128 MiB, and twice as much for Adam
    outrider.train(
        model, torch.optim.Adam, squares, torch.ones(8, 8192), batch_size=4, devices=devices, run_dir=folder
    ).join()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory of CPU ranks can be limited on Linux only")
def test_a_run_that_exceeds_the_limit_of_its_device_never_begins(tmp_path: Path) -> None:
    with pytest.raises(outrider.DeviceError, match=r"^rank 0 \(cpu:400MiB\) needs 403 MB beside its model of 134 MB"):
        train(tmp_path / "refused", "cpu:400MiB")
    with pytest.raises(
        outrider.DeviceError, match=r"^rank 0 \(cpu:100MiB\) has too little memory for the model alone: "
    ):
        train(tmp_path / "refused", "cpu:100MiB")
    train(tmp_path / "fits", "cpu:2GiB")
    events = json.loads((tmp_path / "fits" / "timeline.json").read_text())["events"]
    (event,) = [event for event in events if event["kind"] == "memory"]
    assert event["gradients_bytes"] * 2 == event["optimizer_bytes"] == 2 * event["model_bytes"]
