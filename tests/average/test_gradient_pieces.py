"""Gradients averaged in pieces over shared memory: the bits of wires in one process, written over the gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from outrider.average import gradient_average as module
from outrider.average.arena import Arena
from outrider.average.gradient_average import PiecewiseGradients, are_in_pieces
from outrider.average.gradient_pieces import GradientPieces, cut_gradients
from outrider.average.gradients import GradientExchange
from outrider.average.rank_facts import Settled
from outrider.average.tensor_layout import LayoutPlanner
from outrider.average.transport.collective import meet
from outrider.average.transport.piece_sums import PrivateSums
from outrider.average.transport.shared_memory_sums import SharedMemoryCollective

OnRanks = Callable[[int, Callable[[int, SharedMemoryCollective], Any]], list[Any]]
PIECE_BYTES = 1_000
NUM_STEPS = 3


class Odd(nn.Module):
    """Every kind of gradient: strided, sparse, of other dtypes, of one rank, of nobody, longer than a piece."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.pointwise = nn.Conv2d(4, 3, 1).to(memory_format=torch.channels_last)
        self.long = nn.Linear(40, 50)
        self.half = nn.Linear(9, 7, dtype=torch.bfloat16)
        self.double = nn.Linear(5, 3, dtype=torch.float64)
        self.complex = nn.Linear(3, 2, dtype=torch.complex64)
        self.embedding = nn.Embedding(6, 4, sparse=True)
        self.of_one_rank = nn.Linear(4, 4)
        self.of_nobody = nn.Linear(4, 4)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.transposed = nn.Parameter(torch.zeros(4, 6))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def set_gradients(model: Odd, rank: int, step: int) -> None:
    numbers = torch.Generator().manual_seed(100 * step + rank)
    for name, parameter in model.named_parameters():
        if name.startswith("of_nobody") or (name.startswith("of_one_rank") and rank != 1):
            parameter.grad = None
        elif name.startswith("embedding"):
            rows = torch.tensor([[rank, step]])
            values = torch.rand(2, 4, generator=numbers)
            parameter.grad = torch.sparse_coo_tensor(rows, values, (6, 4), check_invariants=True)
        elif name == "transposed":
            parameter.grad = torch.rand(6, 4, generator=numbers).t()
        else:
            drawn = torch.randn(parameter.shape, generator=numbers, dtype=torch.float64) / 3
            parameter.grad = torch.empty_like(parameter).copy_(drawn)


def models(world_size: int) -> list[Odd]:
    return [Odd() for _ in range(world_size)]


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if one.grad is None else one.grad.detach().clone() for one in model.parameters()]


def samples_of(rank: int, step: int) -> int:
    return 0 if (rank, step) == (1, 2) else 3 + rank + step


def in_one_process(world_size: int) -> list[tuple[list[Tensor | None], Settled]]:
    """What each rank has after every step, rank by rank."""
    own = models(world_size)
    exchanges = [GradientExchange(Arena(one), rank=r, world_size=world_size, num_facts=1) for r, one in enumerate(own)]
    found = []
    for step in range(NUM_STEPS):
        for rank, exchange in enumerate(exchanges):
            set_gradients(own[rank], rank, step)
            exchange.pack(samples_of(rank, step), [rank / 7])
        meet(exchanges)
        settled = [exchange.settle() for exchange in exchanges]
        found += [(gradients(model), each) for model, each in zip(own, settled, strict=True)]
    return found


def in_pieces(world_size: int, on_ranks: OnRanks) -> list[tuple[list[Tensor | None], Settled]]:
    own = models(world_size)
    all_there = threading.Barrier(world_size)

    def run(rank: int, collective: SharedMemoryCollective) -> list[tuple[list[Tensor | None], Settled]]:
        arena = Arena(own[rank])
        pieces = GradientPieces(arena, rank=rank, world_size=world_size, num_facts=1, piece_bytes=PIECE_BYTES)
        average = PiecewiseGradients(pieces, collective)
        found = []
        for step in range(NUM_STEPS):
            set_gradients(own[rank], rank, step)
            average.average(samples_of(rank, step), [rank / 7])
            found.append((gradients(own[rank]), average.facts()))
            # Other collectives may come between two steps.
            assert collective.gather([rank]) == [[one] for one in range(world_size)]
        all_there.wait(30)
        return found

    by_rank = on_ranks(world_size, run)
    return [by_rank[rank][step] for step in range(NUM_STEPS) for rank in range(world_size)]


def same(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> bool:
    return all(
        (one is None and other is None)
        or (one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other))
        for one, other in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("sums", ["shared", "private"])
def test_every_kind_of_gradient_has_the_bits_of_wires(
    world_size: int, sums: str, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sums == "private":
        monkeypatch.setattr(
            module,
            "piece_sums",
            lambda collective, *, rank, world_size, **_: PrivateSums(
                collective, rank=rank, world_size=world_size, pin_memory=False
            ),
        )
    expected, found = in_one_process(world_size), in_pieces(world_size, on_ranks)
    for (wired, told), (pieced, heard) in zip(expected, found, strict=True):
        assert same(wired, pieced)
        assert heard == told


def average_alone(model: nn.Module, on_ranks: OnRanks, *, samples: int = 2) -> Settled:
    """A world of one rank: the mean of a gradient is the gradient."""

    def run(rank: int, collective: SharedMemoryCollective) -> Settled:
        pieces = GradientPieces(Arena(model), rank=0, world_size=1, num_facts=0, piece_bytes=PIECE_BYTES)
        average = PiecewiseGradients(pieces, collective)
        average.average(samples, [])
        return average.facts()

    (settled,) = on_ranks(1, run)
    return settled


def test_the_mean_is_written_over_the_gradient(on_ranks: OnRanks) -> None:
    model = nn.Linear(30, 30)
    model(torch.ones(2, 30)).sum().backward()
    assert model.weight.grad is not None
    memory = model.weight.grad.data_ptr()
    average_alone(model, on_ranks)
    assert model.weight.grad.data_ptr() == memory


def test_a_gradient_that_is_part_of_a_graph_is_left_as_it_is(on_ranks: OnRanks) -> None:
    model = nn.Linear(30, 30)
    (model(torch.ones(2, 30)) ** 2).sum().backward(create_graph=True)
    kept = model.weight.grad
    assert kept is not None
    version = kept._version
    average_alone(model, on_ranks)
    assert kept._version == version
    assert model.weight.grad is not kept
    assert torch.equal(model.weight.grad, kept.detach())


def test_a_conjugated_gradient_is_resolved(on_ranks: OnRanks) -> None:
    model = nn.Linear(30, 30, bias=False, dtype=torch.complex64)
    (torch.ones(2, 30, dtype=torch.complex64) @ model.weight.conj()).abs().sum().backward()
    assert model.weight.grad is not None
    model.weight.grad = model.weight.grad.resolve_conj().conj()
    expected = model.weight.grad.resolve_conj().clone()
    average_alone(model, on_ranks)
    assert torch.equal(model.weight.grad, expected)
    assert not model.weight.grad.is_conj()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, -1])
def test_the_rank_with_a_gradient_that_is_not_finite_is_named(bad: float, at: int, on_ranks: OnRanks) -> None:
    own = [nn.Linear(40, 50), nn.Linear(40, 50)]

    def run(rank: int, collective: SharedMemoryCollective) -> Settled:
        pieces = GradientPieces(Arena(own[rank]), rank=rank, world_size=2, num_facts=0, piece_bytes=PIECE_BYTES)
        average = PiecewiseGradients(pieces, collective)
        for step in range(2):
            for parameter in own[rank].parameters():
                parameter.grad = torch.ones_like(parameter)
            if rank == step == 1:
                assert own[rank].weight.grad is not None
                own[rank].weight.grad.view(-1)[at] = bad
            average.average(1, [])
            assert step or average.facts().not_finite == ()
            average.drop_bad()
            assert own[rank].weight.grad is not None
            assert torch.equal(own[rank].weight.grad, torch.full((50, 40), 1.0 - step))
        return average.facts()

    assert [settled.not_finite for settled in on_ranks(2, run)] == [(1,), (1,)]


def test_no_copy_of_all_gradients_is_kept() -> None:
    pieces = GradientPieces(Arena(nn.Linear(1024, 1024)), rank=0, world_size=2, num_facts=12)
    kept = sum(value.nbytes for value in vars(pieces).values() if isinstance(value, Tensor))
    assert kept <= 4 * pieces.facts.num_slots + 8


@given(
    numels=st.lists(st.integers(0, 700), min_size=1, max_size=12),
    doubles=st.integers(0, 2**12 - 1),
    piece_bytes=st.integers(8, 2_000),
)
def test_pieces_have_every_element_once(numels: list[int], doubles: int, piece_bytes: int) -> None:
    planner = LayoutPlanner()
    dtypes = [torch.float64 if doubles >> place & 1 else torch.bfloat16 for place in range(len(numels))]
    places = [planner.place(torch.zeros(n, dtype=dtype)) for n, dtype in zip(numels, dtypes, strict=True)]
    pieces = cut_gradients(places, piece_bytes=piece_bytes)
    assert all(0 < piece.num_bytes <= piece_bytes for piece in pieces)
    met = [(span.member, at) for piece in pieces for span in piece.spans for at in range(span.start, span.stop)]
    assert sorted(met) == [(member, at) for member, numel in enumerate(numels) for at in range(numel)]


def test_pieces_are_for_large_gradients_of_cpus_on_one_host() -> None:
    large, small = Arena(nn.Linear(1100, 1100)), Arena(nn.Linear(100, 100))
    assert are_in_pieces(large, is_on_cpus=True, is_one_host=True)
    assert not are_in_pieces(small, is_on_cpus=True, is_one_host=True)
    assert not are_in_pieces(large, is_on_cpus=False, is_one_host=True)
    assert not are_in_pieces(large, is_on_cpus=True, is_one_host=False)
