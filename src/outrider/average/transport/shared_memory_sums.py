"""Sums between ranks of one host in shared memory, several times faster than over a network stack.

Decides which rank reads which data, and when. A few bytes over a socket signal that data is ready; a closed socket
means a lost peer. Called by the averagers, the averages of a rank and `wrap()`, like the other collectives.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from outrider.average.transport.collective import BlockingCollective
from outrider.average.transport.shared_memory import Exchange, SharedMemoryGroup, connect_shared_memory
from outrider.errors import PeerLostError, WaitError

PIECE_BYTES = 4 * 2**20
"""Tensors are summed in pieces of this size; smaller pieces need more messages, larger ones gain nothing."""
NUM_PLACES = 6
PLACE_BYTES = 5 * 2**20
"""Size of each place for a piece of an average, or for its sum; a place is reused after NUM_PLACES pieces."""
_PLACES_START = 2 * PIECE_BYTES
_NUM_BYTES = _PLACES_START + 2 * NUM_PLACES * PLACE_BYTES
# Shares of a piece begin at multiples of this many elements, so that they consist of whole cache lines.
_SHARE_NUMEL = 1024
MAX_VIEWS = 64
# More signals than are ever in flight.
_MAX_TOLD = 64
_MESSAGE = struct.Struct("<QQ")
Combine = Callable[[Tensor, Sequence[Tensor]], object]
"""Reduces the pieces of all ranks, in rank order, into the first argument."""


class SharedMemoryCollective(BlockingCollective):
    """In-place collectives in the same order on all ranks; results are bit-identical on all ranks, and equal to `meet`.

    Each rank writes to its own memory and reads the memory of all ranks. Two buffers alternate: a rank that signals a
    piece has finished reading the previous piece, so no rank overwrites data that another rank still reads.
    """

    def __init__(self, shared_memory_group: SharedMemoryGroup, *, what: str, timeout_s: float) -> None:
        world_size = len(shared_memory_group.memories)
        super().__init__(transport="shared memory", rank=shared_memory_group.rank, world_size=world_size)
        self._shared_memory_group = shared_memory_group
        self._what = what
        self._timeout_s = timeout_s
        self._number = 0
        self._told = [b""] * _MAX_TOLD
        self._num_told = 0
        self._num_heard = dict.fromkeys(shared_memory_group.connections, 0)
        self._views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        """Cached views of all ranks' memories by start, element count and dtype; averages reuse the same few sizes."""
        for connection in shared_memory_group.connections.values():
            connection.settimeout(timeout_s)

    @classmethod
    def open(
        cls, rank: int, *, exchange: Exchange, timeout_s: float, what: str = "parameters", base: str | None = None
    ) -> SharedMemoryCollective:
        """Open the collective on all ranks; raises `NoSharedMemory` on all of them if they cannot share memory."""
        shared_memory_group = connect_shared_memory(rank, _NUM_BYTES, exchange=exchange, base=base)
        return cls(shared_memory_group, what=what, timeout_s=timeout_s)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        self._combine_all(tensors, _add_up)

    def max_(self, tensors: Sequence[Tensor]) -> None:
        self._combine_all(tensors, _take_largest)

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        def take(piece: Tensor, pieces: Sequence[Tensor]) -> None:
            if self.rank != source:
                piece.copy_(pieces[source])

        self._combine_all(tensors, take, lays_down=self.rank == source)

    def close(self) -> None:
        self._shared_memory_group.close()

    @torch.no_grad()
    def _combine_all(self, tensors: Sequence[Tensor], combine: Combine, *, lays_down: bool = True) -> None:
        """Reduce piece by piece; a rank with `lays_down` false writes nothing, and its memory is not read."""
        for tensor in tensors:
            assert not tensor.is_cuda, f"shared memory was handed a {tensor.device} tensor"
            flat = tensor.reshape(-1)
            for piece in flat.split(PIECE_BYTES // flat.element_size()):
                self._combine(piece, combine, lays_down)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view_as(tensor))

    def _combine(self, piece: Tensor, combine: Combine, lays_down: bool) -> None:
        pieces = self._pieces((self._number % 2) * PIECE_BYTES, piece)
        if lays_down:
            pieces[self.rank].copy_(piece)
        self._meet(piece.nbytes)
        combine(piece, pieces)
        self._number += 1

    def _pieces(self, start: int, like: Tensor) -> list[Tensor]:
        return self._at(start, like.numel(), like.dtype)

    def _at(self, start: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        key = (start, numel, dtype)
        if key not in self._views:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            stop = start + numel * dtype.itemsize
            self._views[key] = [memory[start:stop].view(dtype) for memory in self.memories]
        return self._views[key]

    # Places for the pieces of an average, filled and read by SharedSums.

    @property
    def memories(self) -> Sequence[Tensor]:
        """The shared memory of every rank, as bytes."""
        return self._shared_memory_group.memories

    def places(self, number: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """The pieces of all ranks at a place."""
        return self._at(_PLACES_START + number * PLACE_BYTES, numel, dtype)

    def sums(self, number: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """The memory of the sum at a place; each rank's memory holds that rank's share."""
        return self._at(_PLACES_START + (NUM_PLACES + number) * PLACE_BYTES, numel, dtype)

    def share(self, numel: int, rank: int) -> slice:
        """The part of a piece that a rank sums."""
        per_rank = -(-numel // (self.world_size * _SHARE_NUMEL)) * _SHARE_NUMEL
        return slice(min(numel, rank * per_rank), min(numel, (rank + 1) * per_rank))

    def signal(self, num_bytes: int) -> int:
        """Signal to all other ranks that the next item in the common order is ready; returns its number."""
        number = self._num_told
        message = self._told[number % _MAX_TOLD] = _MESSAGE.pack(number, num_bytes)
        self._num_told += 1
        for rank, connection in self._shared_memory_group.connections.items():
            with self._watched(rank, num_bytes):
                connection.sendall(message)
        return number

    def await_signals(self, number: int, num_bytes: int) -> None:
        """Wait until all other ranks have sent this signal and all earlier ones."""
        for rank in self._shared_memory_group.connections:
            while self._num_heard[rank] <= number:
                expected = self._told[self._num_heard[rank] % _MAX_TOLD]
                heard = self._hear(rank, num_bytes)
                assert heard == expected, (
                    f"rank {rank} is at {_MESSAGE.unpack(heard)}, expected {_MESSAGE.unpack(expected)}"
                )
                self._num_heard[rank] += 1

    def _meet(self, num_bytes: int) -> None:
        """Signal to all other ranks that this rank's piece is ready, and wait for their signals."""
        self.await_signals(self.signal(num_bytes), num_bytes)

    def _hear(self, rank: int, num_bytes: int) -> bytes:
        heard = b""
        while len(heard) < _MESSAGE.size:
            with self._watched(rank, num_bytes):
                part = self._shared_memory_group.connections[rank].recv(_MESSAGE.size - len(heard))
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
                rank=rank,
            ) from error
        except OSError as error:
            raise PeerLostError(
                f"rank {self.rank} of {self.world_size} lost rank {rank} while exchanging {cargo}: {error}",
                hint="look for the first error among the other ranks",
                rank=rank,
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
