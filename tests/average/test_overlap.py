"""Sums that begin while backward is still at work, with a collective that only takes notes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outrider.average.arena import Arena
from outrider.average.gradients import GradientExchange, cut
from outrider.average.overlap import Overlap
from outrider.average.tensor_layout import LayoutPlanner
from outrider.average.transport.collective import Started, meet
from outrider.errors import StepError

LAYER_BYTES = 8 * (9 + 3)


class Notes:
    """Which gradients were there when each sum began."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.seen: list[list[str]] = []

    def start_sum_(self, tensor: Tensor) -> Started:
        self.seen.append([name for name, one in self._model.named_parameters() if one.grad is not None])
        return Started(tensor, None)


def three_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3, dtype=torch.float64) for _ in range(3)))


def overlap_of(model: nn.Module, *, rank: int = 0, world_size: int = 1) -> tuple[Overlap, Notes]:
    notes = Notes(model)
    exchange = GradientExchange(
        Arena(model), rank=rank, world_size=world_size, num_facts=0, bucket_bytes=LAYER_BYTES, last_bytes=LAYER_BYTES
    )
    return Overlap(exchange, notes), notes


def step(overlap: Overlap, model: nn.Module, forward: Callable[[Tensor], Tensor], *, samples: int = 2) -> int:
    """One step up to the packed wires; how many sums had begun before its end."""
    model.zero_grad(set_to_none=True)
    with overlap.backward(samples):
        forward(torch.ones(samples, 3, dtype=torch.float64)).square().mean().backward()
    num_started = len(overlap.take_started())
    overlap.exchange.pack(samples, [])
    return num_started


def test_a_bucket_is_summed_as_soon_as_its_last_gradient_is_there() -> None:
    model = three_layers()
    overlap, notes = overlap_of(model)
    assert [step(overlap, model, model) for _ in range(3)] == [0, 2, 2]
    last, middle = ["2.weight", "2.bias"], ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert notes.seen == [last, middle, last, middle]


def test_what_is_overlapped_is_what_would_have_been_summed_afterwards() -> None:
    models = [three_layers() for _ in range(2)]
    plain = [three_layers() for _ in range(2)]
    overlaps = [overlap_of(model, rank=rank, world_size=2)[0] for rank, model in enumerate(models)]
    exchanges = [overlap_of(model, rank=rank, world_size=2)[0].exchange for rank, model in enumerate(plain)]
    for _ in range(2):
        for rank in range(2):
            step(overlaps[rank], models[rank], models[rank], samples=1 + rank)
            plain[rank].zero_grad(set_to_none=True)
            plain[rank](torch.ones(1 + rank, 3, dtype=torch.float64)).square().mean().backward()
            exchanges[rank].pack(1 + rank, [])
        meet([overlap.exchange for overlap in overlaps])
        meet(exchanges)
        for exchange in (*exchanges, *(overlap.exchange for overlap in overlaps)):
            exchange.settle()
    for mine, theirs in zip(models[1].parameters(), plain[1].parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_nothing_is_left_on_the_model() -> None:
    model = three_layers()
    overlap, _ = overlap_of(model)
    for _ in range(2):
        step(overlap, model, model)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_parameter_that_is_not_used_leaves_everything_to_the_end() -> None:
    model = three_layers()
    overlap, notes = overlap_of(model)
    assert [step(overlap, model, lambda x: model[2](model[0](x))) for _ in range(3)] == [0, 0, 0]
    assert notes.seen == []


def test_another_way_through_the_model_holds_sums_up_but_changes_nothing() -> None:
    model = three_layers()
    overlap, notes = overlap_of(model)
    step(overlap, model, model)
    assert step(overlap, model, lambda x: model[0](model[1](model[2](x)))) == 2
    assert notes.seen[0] == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert step(overlap, model, lambda x: model[1](model[0](x))) == 0


def accumulated(overlap: Overlap | None, model: nn.Module, *forwards: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """One step of a micro-batch per forward pass, the last one overlapped; returns the packed gradients."""
    model.zero_grad(set_to_none=True)
    for number, forward in enumerate(forwards, start=1):
        with overlap.backward(4) if overlap is not None and number == len(forwards) else contextlib.nullcontext():
            forward(torch.full((2, 3), float(number), dtype=torch.float64)).square().mean().backward()
    exchange = overlap_of(model)[0].exchange if overlap is None else overlap.exchange
    exchange.pack(4, [])
    return [wire.clone() for wire in exchange.wires]


def test_with_micro_batches_sums_begin_in_the_last_one() -> None:
    model = three_layers()
    overlap, notes = overlap_of(model)
    for _ in range(2):
        sent = accumulated(overlap, model, model, model)
        num_started = len(overlap.take_started())
        assert all(torch.equal(a, b) for a, b in zip(sent, accumulated(None, model, model, model), strict=True))
    assert num_started == len(notes.seen) == 2


def test_a_micro_batch_that_goes_another_way_sends_only_complete_gradients() -> None:
    model = three_layers()
    overlap, notes = overlap_of(model)
    accumulated(overlap, model, model, model)
    overlap.take_started()

    def other(x: Tensor) -> Tensor:
        return model[0](model[2](model[1](x)))

    def shorter(x: Tensor) -> Tensor:
        return model[1](model[0](x))

    for last, num_started in ((other, 2), (shorter, 0)):
        sent = accumulated(overlap, model, model, last)
        assert len(overlap.take_started()) == num_started
        assert all(torch.equal(a, b) for a, b in zip(sent, accumulated(None, model, model, last), strict=True))
    assert len(notes.seen) == 2


def test_one_bucket_has_nothing_to_overlap() -> None:
    model = nn.Linear(3, 1, dtype=torch.float64)
    overlap, notes = overlap_of(model)
    assert [step(overlap, model, model) for _ in range(2)] == [0, 0]
    assert notes.seen == []


def test_gradients_that_come_in_parts_in_the_first_step_are_never_overlapped() -> None:
    model = three_layers()
    overlap, _ = overlap_of(model)

    def reentered(x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(model, x.requires_grad_(), use_reentrant=True)
        return x

    assert [step(overlap, model, reentered) for _ in range(2)] == [0, 0]


def test_a_gradient_that_changes_after_its_sum_began_is_refused() -> None:
    model = three_layers()
    overlap, _ = overlap_of(model)
    step(overlap, model, model)
    model.zero_grad(set_to_none=True)
    with overlap.backward(1):
        model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    model[2].weight.grad.add_(1.0)
    with pytest.raises(StepError) as caught:
        overlap.take_started()
    assert caught.value.message == "the gradient of parameter 4 changed after it was complete in the first step"
    assert caught.value.hint == "activation checkpointing must not re-enter backward: pass use_reentrant=False"


def test_mixed_dtypes_on_one_wire_are_one_bucket() -> None:
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16)])
    exchange = GradientExchange(Arena(model), rank=0, world_size=1, num_facts=0, bucket_bytes=1)
    assert [len(bucket.members) for bucket in exchange.buckets] == [4]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 400), st.integers(0, 400))
def test_buckets_are_the_whole_wire_from_its_end_to_its_start(
    sizes: list[int], max_bytes: int, last_bytes: int
) -> None:
    planner = LayoutPlanner()
    places = [planner.place(torch.empty(size)) for size in sizes]
    pieces = cut(places, range(len(places)), max_bytes=max_bytes, last_bytes=last_bytes)
    assert [member for _, members in pieces for member in members] == list(reversed(range(len(sizes))))
    starts = [start for start, _ in pieces]
    assert starts[-1] == 0
    assert all(later < earlier for earlier, later in pairwise(starts))
    assert all(places[members[-1]].offset >= start for start, members in pieces)


def test_the_last_bucket_is_small_or_one_parameter() -> None:
    planner = LayoutPlanner()
    places = [planner.place(torch.empty(size)) for size in (2, 3, 4, 50, 6)]
    assert [members for _, members in cut(places, range(5), max_bytes=250, last_bytes=20)] == [(4, 3, 2), (1, 0)]
    assert [members for _, members in cut(places, range(5), max_bytes=250, last_bytes=0)] == [(4, 3, 2, 1), (0,)]
    assert [members for _, members in cut(places, range(5), max_bytes=200, last_bytes=20)] == [(4, 3), (2,), (1, 0)]


def test_few_bytes_are_one_bucket() -> None:
    planner = LayoutPlanner()
    places = [planner.place(torch.empty(size)) for size in (2, 3, 4, 50, 6)]
    assert cut(places, range(5), max_bytes=260, last_bytes=20) == [(0, (4, 3, 2, 1, 0))]
