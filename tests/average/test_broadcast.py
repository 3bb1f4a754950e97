"""What one rank holds, brought to others: two ranks as threads that meet in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from outrider.average.arena import Arena
from outrider.average.broadcast import ReceivedState, StateBroadcast
from outrider.average.transport.collective import RankCollective

CPU = torch.device("cpu")
SOURCE = 1


class Table:
    """Where two ranks lay down what they have."""

    def __init__(self) -> None:
        self.laid: dict[int, list[Tensor]] = {}
        self.barrier = threading.Barrier(2, timeout=20)
        self.sizes: list[list[int]] = []
        """Of what rank 0 laid down, in bytes, meeting by meeting."""


class TableCollective:
    transport = "table"
    world_size = 2

    def __init__(self, rank: int, table: Table) -> None:
        self.rank = rank
        self._table = table

    def _meet(self, tensors: Sequence[Tensor], change: Callable[[Tensor, list[Tensor]], Tensor]) -> None:
        self._table.laid[self.rank] = [tensor.clone() for tensor in tensors]
        if self.rank == 0:
            self._table.sizes.append([tensor.nbytes for tensor in tensors])
        self._table.barrier.wait()
        for number, tensor in enumerate(tensors):
            change(tensor, [self._table.laid[rank][number] for rank in range(2)])
        self._table.barrier.wait()

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        self._meet(tensors, lambda own, laid: own.copy_(laid[0] + laid[1]))

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        self._meet(tensors, lambda own, laid: own.copy_(laid[source]))

    def finish(self, timeout_s: float) -> None: ...


def received(manifest: bytes, places: Callable[[int, bytes], Sequence[Tensor]]) -> list[ReceivedState]:
    """By both ranks at the same time."""
    return relayed_in_turn([manifest], places)[0]


def relayed_in_turn(
    manifests: Sequence[bytes], places: Callable[[int, bytes], Sequence[Tensor]], table: Table | None = None
) -> list[list[ReceivedState]]:
    """One manifest after the other, each by both ranks at the same time."""
    table, words_table = table or Table(), Table()

    def broadcast(rank: int) -> list[ReceivedState]:
        model = nn.Linear(2, 1)
        collective, words = (cast(RankCollective, TableCollective(rank, one)) for one in (table, words_table))
        broadcast = StateBroadcast(Arena(model), collective, words=words, device=CPU, timeout_s=10.0)
        outcomes = []
        for manifest in manifests:
            own = manifest if rank == SOURCE else b""
            with torch.no_grad():
                model.weight.fill_(float(rank))
            outcomes.append(
                broadcast.everything(SOURCE, facts=[10.0 + rank], manifest=own, places=lambda told: places(rank, told))
            )
            assert torch.equal(model.weight, torch.full((1, 2), float(SOURCE)))
        return outcomes

    with ThreadPoolExecutor(2) as pool:
        return [list(pair) for pair in zip(*pool.map(broadcast, range(2)), strict=True)]


def test_facts_of_all_and_the_manifest_of_one_reach_everybody() -> None:
    for outcome in received(b"two spoons", lambda rank, told: []):
        assert outcome.facts == ((10.0,), (11.0,))
        assert outcome.manifest == b"two spoons"


@pytest.mark.parametrize(
    "full",
    [
        [torch.arange(6.0).reshape(2, 3), torch.tensor(7.0)],
        [torch.arange(5), torch.tensor([True, False, True]), torch.tensor(0.5, dtype=torch.bfloat16)],
        [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.empty(0)],
        [torch.tensor([1 + 2j]), torch.randn(3, dtype=torch.float64)],
        [torch.arange(2.0**18), torch.tensor(1.0), torch.randn(4, 8, 64, 256).to(memory_format=torch.channels_last)],
        [],
    ],
    ids=["floats", "kinds", "formats", "wide", "large", "none"],
)
def test_tensors_arrive_where_they_belong(full: list[Tensor]) -> None:
    own = [torch.zeros_like(tensor) for tensor in full]
    outcomes = received(b"all", lambda rank, told: full if rank == SOURCE else own)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(own, full, strict=True))
    assert all(mine is place for mine, place in zip(outcomes[1 - SOURCE].tensors, own, strict=True))


def test_places_are_made_from_the_manifest() -> None:
    outcomes = received(b"3", lambda rank, told: [torch.ones(3)] if rank == SOURCE else [torch.zeros(int(told))])
    assert outcomes[1 - SOURCE].tensors[0].tolist() == [1.0, 1.0, 1.0]


def test_a_manifest_that_all_have_is_not_sent_again() -> None:
    table = Table()
    manifests = [b"two spoons", b"two spoons", b"one knife", b"two spoons"]
    outcomes = relayed_in_turn(manifests, lambda rank, told: [], table)
    assert [[one.manifest for one in pair] for pair in outcomes] == [[manifest] * 2 for manifest in manifests]
    assert [sizes for sizes in table.sizes if sizes in ([10], [9])] == [[10], [9], [10]]


def test_a_large_tensor_travels_by_itself() -> None:
    table, full, own = Table(), torch.arange(2.0**18), torch.zeros(2**18)
    relayed_in_turn([b""], lambda rank, told: [(full if rank == SOURCE else own), torch.zeros(3)], table)
    assert torch.equal(own, full)
    (weights,) = Arena(nn.Linear(2, 1)).flats.values()
    assert table.sizes == [[full.nbytes], [weights.nbytes + 3 * 4]]
