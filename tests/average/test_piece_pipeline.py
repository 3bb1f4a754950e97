"""Averages of many pieces over shared memory: the bits of one process, whatever copies the pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.average import exchange as exchange_module
from outrider.average.arena import Arena
from outrider.average.exchange import Exchange
from outrider.average.host_average import CudaLane, HostAverager
from outrider.average.outer import Outer
from outrider.average.transport.collective import meet_pieces
from outrider.average.transport.piece_sums import PrivateSums, SharedSums, piece_sums
from outrider.average.transport.shared_memory_sums import PLACE_BYTES, SharedMemoryCollective

OnRanks = Callable[[int, Callable[[int, SharedMemoryCollective], Any]], list[Any]]
NUM_AVERAGES = 3
PIECE_NUMEL = 1_500


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "PIECE_NUMEL", PIECE_NUMEL)


@pytest.fixture
def made_up_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and events that do everything at once, on the CPU."""

    @contextlib.contextmanager
    def on(stream: object) -> Iterator[None]:
        yield

    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None, elapsed_time=lambda other: 1.0)
    stream = SimpleNamespace(wait_event=lambda event: None, wait_stream=lambda stream: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", on)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 99), nn.BatchNorm1d(99), nn.Linear(50, 31, dtype=torch.bfloat16))


def move(exchange: Exchange, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + exchange.rank)
    for flat in exchange.arena.flats.values():
        flat.add_(torch.rand(flat.shape, generator=generator).to(flat.dtype))


def make_exchange(rank: int, world_size: int, wire: str = "fp32") -> Exchange:
    outer = Outer(kind="nesterov", momentum=0.5)
    return Exchange(Arena(build()), rank=rank, world_size=world_size, num_facts=1, outer=outer, wire=wire)


def flats(exchange: Exchange) -> list[Tensor]:
    return [flat.clone() for flat in exchange.arena.flats.values()]


def in_one_process(world_size: int, wire: str = "fp32") -> list[list[Tensor]]:
    exchanges = [make_exchange(rank, world_size, wire) for rank in range(world_size)]
    for number in range(NUM_AVERAGES):
        for exchange in exchanges:
            move(exchange, number)
            exchange.snapshot()
            exchange.open(exchange.rank + 1, [0.0])
        meet_pieces(exchanges)
        for exchange in exchanges:
            move(exchange, -number) if number % 2 else None
            exchange.add_correction() if number % 2 else exchange.load()
    return [flats(exchange) for exchange in exchanges]


def over_shared_memory(
    world_size: int, on_ranks: OnRanks, *, lanes: Callable[[HostAverager], object], wire: str = "fp32"
) -> list[list[Tensor]]:
    exchanges = [make_exchange(rank, world_size, wire) for rank in range(world_size)]

    def run(rank: int, collective: SharedMemoryCollective) -> list[Tensor]:
        exchange = exchanges[rank]
        with HostAverager(exchange, collective) as averager:
            lanes(averager)
            for number in range(NUM_AVERAGES):
                move(exchange, number)
                if number % 2:
                    averager.begin(rank + 1, [0.0])
                    move(exchange, -number)
                    averager.correct()
                else:
                    averager.average(rank + 1, [0.0])
            assert isinstance(averager._sums, SharedSums)
        return flats(exchange)

    return on_ranks(world_size, run)


def assert_equal(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_pieces_over_shared_memory_give_the_bits_of_one_process(world_size: int, wire: str, on_ranks: OnRanks) -> None:
    assert len(make_exchange(0, world_size).pieces) > 6
    found = over_shared_memory(world_size, on_ranks, lanes=lambda averager: None, wire=wire)
    assert_equal(found, in_one_process(world_size, wire))


@pytest.mark.usefixtures("made_up_device")
@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("pieces_at_once", [1, 3])
def test_ranks_with_and_without_a_gpu_give_the_same_bits(
    wire: str, pieces_at_once: int, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    numel = pieces_at_once * PIECE_NUMEL
    monkeypatch.setattr(Exchange, "_chunk_numel", lambda exchange, whole: numel)
    sizes = [len(chunk.pieces) for chunk in make_exchange(0, 2).chunks]
    assert max(sizes) == pieces_at_once

    def lanes(averager: HostAverager) -> None:
        if averager.exchange.rank == 0:
            averager._lane = CudaLane(torch.device("cpu"))

    assert_equal(over_shared_memory(2, on_ranks, lanes=lanes, wire=wire), in_one_process(2, wire))


def test_a_piece_that_is_too_large_for_shared_memory_is_summed_elsewhere() -> None:
    collective = SharedMemoryCollective.__new__(SharedMemoryCollective)
    assert isinstance(
        piece_sums(collective, rank=0, world_size=2, largest_bytes=PLACE_BYTES, pin_memory=False), SharedSums
    )
    assert isinstance(
        piece_sums(collective, rank=0, world_size=2, largest_bytes=PLACE_BYTES + 4, pin_memory=False), PrivateSums
    )
