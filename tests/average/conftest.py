"""Worlds of two ranks in one process: exchanges that meet, and a collective for averagers in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.average.arena import Arena
from outrider.average.exchange import Exchange
from outrider.average.rank_facts import Settled
from outrider.average.transport.collective import meet_pieces
from outrider.average.transport.shared_memory_sums import SharedMemoryCollective


@dataclass
class World:
    """Replicas of one model, their exchanges, and what an average between them returns."""

    models: list[nn.Module]
    exchanges: list[Exchange]

    def begin(self, samples: Sequence[int]) -> None:
        for exchange, own in zip(self.exchanges, samples, strict=True):
            exchange.snapshot()
            exchange.open(own, [float(exchange.rank)])

    def settle(self) -> list[Settled]:
        return meet_pieces(self.exchanges)

    def average(self, samples: Sequence[int]) -> list[Settled]:
        self.begin(samples)
        settled = self.settle()
        for exchange in self.exchanges:
            exchange.load()
        return settled

    def values(self, name: str) -> list[Tensor]:
        return [model.state_dict()[name].clone() for model in self.models]


@pytest.fixture
def make_world() -> Callable[..., World]:
    def make(build: Callable[[], nn.Module], *, world_size: int = 2, **options: object) -> World:
        models = [build() for _ in range(world_size)]
        for model in models[1:]:
            model.load_state_dict(models[0].state_dict())
        exchanges = [
            Exchange(Arena(model), rank=rank, world_size=world_size, num_facts=1, **options)  # type: ignore[arg-type]
            for rank, model in enumerate(models)
        ]
        return World(models=models, exchanges=exchanges)

    return make


@dataclass
class ThreadCollective:
    """Collectives between threads of one process, for two ranks."""

    rank: int
    tensors: dict[int, Sequence[Tensor]]
    barrier: threading.Barrier

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        self._combine(tensors, torch.add)

    def max_(self, tensors: Sequence[Tensor]) -> None:
        self._combine(tensors, torch.maximum)

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        self._combine(tensors, lambda first, second: (first, second)[source].clone())

    def check_peers(self) -> None:
        pass

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        table = torch.zeros(2, len(values), dtype=torch.int64)
        table[self.rank] = torch.tensor(values)
        self.sum_([table])
        rows: list[list[int]] = table.tolist()
        return rows

    def _combine(self, tensors: Sequence[Tensor], operation: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.tensors[self.rank] = tensors
        self.barrier.wait(20)
        results = [operation(*pair) for pair in zip(self.tensors[0], self.tensors[1], strict=True)]
        self.barrier.wait(20)
        for tensor, result in zip(tensors, results, strict=True):
            tensor.copy_(result)
        self.barrier.wait(20)


@pytest.fixture
def thread_collectives() -> list[ThreadCollective]:
    tensors: dict[int, Sequence[Tensor]] = {}
    barrier = threading.Barrier(2)
    return [ThreadCollective(rank=rank, tensors=tensors, barrier=barrier) for rank in range(2)]


OnRanks = Callable[[int, Callable[[int, SharedMemoryCollective], Any]], list[Any]]


@pytest.fixture
def on_ranks(tmp_path: Path) -> OnRanks:
    """Ranks as threads, each with its shared memory: what each of them returns."""

    def on_ranks(world_size: int, run: Callable[[int, SharedMemoryCollective], Any]) -> list[Any]:
        values: dict[int, Any] = {}
        barrier = threading.Barrier(world_size)

        def rank_main(rank: int) -> Any:
            def exchange(own: Any) -> list[Any]:
                values[rank] = own
                barrier.wait(30)
                told = [values[one] for one in range(world_size)]
                barrier.wait(30)
                return told

            with closing(
                SharedMemoryCollective.open(rank, exchange=exchange, timeout_s=30.0, base=str(tmp_path))
            ) as collective:
                return run(rank, collective)

        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(rank_main, range(world_size)))

    return on_ranks
