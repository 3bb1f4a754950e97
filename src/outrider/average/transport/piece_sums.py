"""Sums the pieces of an average one after another; provides the memory for each piece and for its sum.

Decides how many pieces are in progress, so that a rank can fill, sum and read different pieces at the same time. Does
not interpret them. Called by HostAverager and PiecewiseGradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.average.transport.collective import Collective, GroupCollective, Started
from outrider.average.transport.packet_sums import PacketSums, add_packets
from outrider.average.transport.shared_memory_sums import NUM_PLACES, PLACE_BYTES, SharedMemoryCollective
from outrider.average.wire_codec import PacketForm


class PieceSums(Protocol):
    """Sums of pieces in host memory, in the same order on all ranks."""

    depth: int
    """How many pieces may have a place before the oldest is finished."""

    def place(self, numel: int, dtype: torch.dtype, form: PacketForm | None = None) -> Tensor:
        """The memory for the next piece; with a form, the piece is a packet, and its decoded values are summed."""

    def start(self) -> None:
        """Start the sum of the oldest place that was not started; the caller has filled it."""

    def finish(self) -> Sequence[Tensor]:
        """Wait for the oldest sum and return its consecutive segments; they may be read until `depth` more starts."""


class PrivateSums:
    """Pieces in this rank's own buffers, summed by any collective."""

    def __init__(self, collective: Collective, *, rank: int, world_size: int, pin_memory: bool) -> None:
        self._collective = collective
        self._pin_memory = pin_memory
        # Only a process group can sum in the background.
        self._group = collective if isinstance(collective, GroupCollective) else None
        self.depth = 2 if self._group is not None else 0
        self._buffers: list[Tensor] = []
        self._number = 0
        self._filled: deque[tuple[Tensor, PacketForm | None]] = deque()
        self._started: deque[tuple[Tensor, PacketForm | None, Started | None]] = deque()
        self._packets = PacketSums(collective, rank=rank, world_size=world_size)

    def place(self, numel: int, dtype: torch.dtype, form: PacketForm | None = None) -> Tensor:
        # Copies to a device may still read the sums of the two pieces finished last.
        number = self._number % (self.depth + 4)
        self._number += 1
        num_bytes = numel * dtype.itemsize
        while len(self._buffers) <= number:
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if self._buffers[number].numel() < num_bytes:
            self._buffers[number] = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._pin_memory)
        self._filled.append((self._buffers[number][:num_bytes].view(dtype), form))
        return self._filled[-1][0]

    def start(self) -> None:
        piece, form = self._filled.popleft()
        is_begun = self._group is not None and form is None
        self._started.append((piece, form, self._group.start_sum_(piece) if is_begun and self._group else None))

    def finish(self) -> Sequence[Tensor]:
        piece, form, started = self._started.popleft()
        if form is not None:
            total = torch.empty(form.numel, pin_memory=self._pin_memory)
            self._packets.sum_(piece, form, total)
            return [total]
        if started is None or self._group is None:
            self._collective.sum_([piece])
        else:
            self._group.wait([started])
        return [piece]


class SharedSums:
    """Pieces that are written directly to shared memory: each rank sums its share of a piece, and reads all shares.

    A rank sums its share of a piece a few pieces after writing it, and reads the sum a few pieces later, so ranks need
    not run in lockstep. Signals protect places from being overwritten while they are read. A rank that signals that its
    share is summed has read the pieces of the other ranks. A rank that signals that its piece is written has read the
    sums of all pieces more than `depth` before it.
    """

    depth = NUM_PLACES - 2

    def __init__(self, collective: SharedMemoryCollective) -> None:
        self._collective = collective
        self._number = 0
        self._filled: deque[_SharedPiece] = deque()
        self._started: deque[_SharedPiece] = deque()
        self._summed: deque[_SharedPiece] = deque()

    @property
    def memories(self) -> Sequence[Tensor]:
        """The shared memory of every rank, which holds places and sums."""
        return self._collective.memories

    def place(self, numel: int, dtype: torch.dtype, form: PacketForm | None = None) -> Tensor:
        assert numel * dtype.itemsize <= PLACE_BYTES, f"{numel} values of {dtype} do not fit"
        self._filled.append(_SharedPiece(place=self._number % NUM_PLACES, numel=numel, dtype=dtype, form=form))
        self._number += 1
        return self._collective.places(self._filled[-1].place, numel, dtype)[self._collective.rank]

    def start(self) -> None:
        piece = self._filled.popleft()
        piece.told = self._collective.signal(piece.num_bytes)
        self._started.append(piece)
        if len(self._started) > self.depth // 2:
            self._sum_share()

    def finish(self) -> Sequence[Tensor]:
        if not self._summed:
            self._sum_share()
        piece = self._summed.popleft()
        collective = self._collective
        collective.await_signals(piece.told, piece.num_bytes)
        sums = collective.sums(piece.place, piece.sum_numel, piece.sum_dtype)
        shares = (collective.share(piece.sum_numel, rank) for rank in range(collective.world_size))
        return [sums[rank][share] for rank, share in enumerate(shares) if share.start < share.stop]

    @torch.no_grad()
    def _sum_share(self) -> None:
        piece = self._started.popleft()
        collective = self._collective
        collective.await_signals(piece.told, piece.num_bytes)
        own = collective.share(piece.sum_numel, collective.rank)
        total = collective.sums(piece.place, piece.sum_numel, piece.sum_dtype)[collective.rank][own]
        pieces = collective.places(piece.place, piece.numel, piece.dtype)
        if piece.form is None:
            _add_up([one[own] for one in pieces], total)
        else:
            add_packets(pieces, piece.form, total, start=own.start)
        piece.told = collective.signal(piece.num_bytes)
        self._summed.append(piece)


@dataclass(kw_only=True, slots=True)
class _SharedPiece:
    place: int
    numel: int
    dtype: torch.dtype
    form: PacketForm | None
    told: int = -1
    """The number of the last signal about this piece."""

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def sum_numel(self) -> int:
        return self.numel if self.form is None else self.form.numel

    @property
    def sum_dtype(self) -> torch.dtype:
        return self.dtype if self.form is None else torch.float32


def _add_up(pieces: Sequence[Tensor], total: Tensor) -> None:
    first, *others = pieces
    torch.add(first, others[0], out=total) if others else total.copy_(first)
    for other in others[1:]:
        total.add_(other)


def piece_sums(
    collective: Collective, *, rank: int, world_size: int, largest_bytes: int, pin_memory: bool
) -> PieceSums:
    """Sums in shared memory if the ranks have it and the largest piece fits, else in the rank's own buffers."""
    if isinstance(collective, SharedMemoryCollective) and largest_bytes <= PLACE_BYTES:
        return SharedSums(collective)
    return PrivateSums(collective, rank=rank, world_size=world_size, pin_memory=pin_memory)
