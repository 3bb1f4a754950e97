"""Sums between ranks of one machine, in memory that all of them see: several times quicker than over a network stack.

Decides who reads what when; a few bytes over a socket say that data is there, and the socket's end that a peer is gone.
Called by the averagers, the rank driver and `wrap()`, as the other collectives are.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from outrider.average.collective import Started, gather_by_sum
from outrider.average.doorway import Exchange, Neighbours, meet_neighbours
from outrider.errors import PeerLostError, WaitError

PIECE_BYTES = 4 * 2**20
"""Larger tensors go piece by piece: smaller ones pay for more messages, larger ones bring nothing."""
_MESSAGE = struct.Struct("<QQ")
Combine = Callable[[Tensor, Sequence[Tensor]], object]
"""Writes to the first what the pieces of all ranks, in their order, make together."""


class NeighbourCollective:
    """In place and on every rank, in the same order; results have the same bits on all ranks, as those of `meet`.

    Each rank writes to its own memory and reads everybody's. There are two places, used in turn: who tells that a
    piece is there has read all of the piece before, so nobody overwrites what somebody still reads.
    """

    def __init__(self, neighbours: Neighbours, *, what: str, timeout_s: float) -> None:
        self.transport = "shared memory"
        self.rank = neighbours.rank
        self.world_size = len(neighbours.memories)
        self._neighbours = neighbours
        self._what = what
        self._timeout_s = timeout_s
        self._number = 0
        for connection in neighbours.connections.values():
            connection.settimeout(timeout_s)

    @classmethod
    def open(cls, rank: int, *, exchange: Exchange, timeout_s: float, what: str = "parameters") -> NeighbourCollective:
        """By all ranks together; raises `NoDoorway` on all of them where they cannot share memory."""
        neighbours = meet_neighbours(rank, 2 * PIECE_BYTES, exchange=exchange)
        return cls(neighbours, what=what, timeout_s=timeout_s)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        self._combine_all(tensors, _add_up)

    def max_(self, tensors: Sequence[Tensor]) -> None:
        self._combine_all(tensors, _take_largest)

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        def take(piece: Tensor, pieces: Sequence[Tensor]) -> None:
            if self.rank != source:
                piece.copy_(pieces[source])

        self._combine_all(tensors, take, lays_down=self.rank == source)

    def start_sum_(self, tensor: Tensor) -> Started:
        """Nothing is gained by doing it later: the cores that sum are those that compute."""
        self.sum_([tensor])
        return Started(tensor, None)

    def wait(self, sums: Sequence[Started]) -> None:
        """They were done when they began."""

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        return gather_by_sum(self, values, device="cpu")

    def check_peers(self) -> None:
        """Whoever waits for a peer hears of its end by itself."""

    def finish(self, timeout_s: float) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        self._neighbours.close()

    @torch.no_grad()
    def _combine_all(self, tensors: Sequence[Tensor], combine: Combine, *, lays_down: bool = True) -> None:
        """Where a rank lays nothing down, nobody reads what it has."""
        for tensor in tensors:
            assert not tensor.is_cuda, f"shared memory was handed a {tensor.device} tensor"
            flat = tensor.reshape(-1)
            for piece in flat.split(PIECE_BYTES // flat.element_size()):
                self._combine(piece, combine, lays_down)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view_as(tensor))

    def _combine(self, piece: Tensor, combine: Combine, lays_down: bool) -> None:
        start = (self._number % 2) * PIECE_BYTES
        stop = start + piece.nbytes
        pieces = [memory[start:stop].view(piece.dtype) for memory in self._neighbours.memories]
        if lays_down:
            pieces[self.rank].copy_(piece)
        self._meet(piece.nbytes)
        combine(piece, pieces)
        self._number += 1

    def _meet(self, num_bytes: int) -> None:
        """Tell all others that this rank's piece is there, and hear the same of theirs."""
        message = _MESSAGE.pack(self._number, num_bytes)
        for rank, connection in self._neighbours.connections.items():
            with self._watched(rank, num_bytes):
                connection.sendall(message)
        for rank in self._neighbours.connections:
            heard = self._hear(rank, num_bytes)
            assert heard == message, f"rank {rank} is at {_MESSAGE.unpack(heard)}, expected {_MESSAGE.unpack(message)}"

    def _hear(self, rank: int, num_bytes: int) -> bytes:
        heard = b""
        while len(heard) < _MESSAGE.size:
            with self._watched(rank, num_bytes):
                part = self._neighbours.connections[rank].recv(_MESSAGE.size - len(heard))
                if not part:
                    raise ConnectionError("it has closed its end")
                heard += part
        return heard

    @contextlib.contextmanager
    def _watched(self, rank: int, num_bytes: int) -> Iterator[None]:
        cargo = f"{self._what} ({num_bytes:,} bytes in {self.transport})"
        try:
            yield
        except TimeoutError as error:
            raise WaitError(
                f"rank {self.rank} waited {self._timeout_s:g} s for {cargo} of rank {rank}",
                hint="that rank may be stuck or far slower than the others: look at the rank logs",
                rank=self.rank,
            ) from error
        except OSError as error:
            raise PeerLostError(
                f"rank {self.rank} of {self.world_size} lost rank {rank} while exchanging {cargo}: {error}",
                hint="look for the first error among the other ranks",
                rank=self.rank,
            ) from error


def _add_up(piece: Tensor, pieces: Sequence[Tensor]) -> None:
    first, *others = pieces
    if not others:
        return
    torch.add(first, others[0], out=piece)
    for other in others[1:]:
        piece.add_(other)


def _take_largest(piece: Tensor, pieces: Sequence[Tensor]) -> None:
    piece.copy_(pieces[0])
    for other in pieces[1:]:
        torch.maximum(piece, other, out=piece)
