"""Decides how the gradients of a shared step are averaged: in buckets that overlap backward, or in cache-sized pieces.

Called by the averages of a rank.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from outrider.average.arena import Arena
from outrider.average.gradient_pieces import GradientPieces
from outrider.average.gradients import GradientExchange
from outrider.average.overlap import Overlap
from outrider.average.rank_facts import Settled
from outrider.average.transport.collective import RankCollective
from outrider.average.transport.piece_sums import piece_sums


class GradientAverage(Protocol):
    """The averages of the gradients of one arena; all ranks call the same methods in the same order."""

    @property
    def num_bytes(self) -> int:
        """Bytes that one average sends."""

    @property
    def can_overlap(self) -> bool:
        """Whether sums can start before a backward pass ends."""

    def overlapped(self, samples: int) -> AbstractContextManager[None]:
        """Context of the backward pass that completes the gradients; sums may start before it ends."""

    def average(self, samples: int, facts: Sequence[float]) -> None:
        """Replace the gradients of every rank by their mean; on a device this is queued, and the host does not wait."""

    def drop_bad(self) -> None:
        """Zero the mean if any rank's gradients are not finite; for callers that update before they read the facts."""

    def facts(self) -> Settled:
        """The facts of all ranks; waits until the device has reached this point."""


class BucketGradients:
    """Copies gradients to wires and sums these bucket by bucket, on any device and during backward."""

    def __init__(self, exchange: GradientExchange, collective: RankCollective, *, timeout_s: float) -> None:
        self._exchange = exchange
        self._collective = collective
        self._timeout_s = timeout_s
        self._overlap = Overlap(exchange, collective)

    @property
    def num_bytes(self) -> int:
        return self._exchange.num_bytes

    @property
    def can_overlap(self) -> bool:
        return self._overlap.is_possible

    def overlapped(self, samples: int) -> AbstractContextManager[None]:
        return self._overlap.backward(samples)

    def average(self, samples: int, facts: Sequence[float]) -> None:
        started = self._overlap.take_started()
        started += [self._collective.start_sum_(wire) for wire in self._exchange.pack(samples, facts)]
        self._collective.wait(started)
        if not self._exchange.has_all:
            # `hand_out` reads from the device which parameters get a gradient; a lost peer must not block that forever.
            self._collective.finish(self._timeout_s)
        self._exchange.hand_out()

    def drop_bad(self) -> None:
        self._exchange.drop_bad()

    def facts(self) -> Settled:
        self._collective.finish(self._timeout_s)
        return self._exchange.facts()


class PiecewiseGradients:
    """Averages gradients in host memory: several pieces are in progress at a time, and the mean replaces the gradient.

    The facts are sent first, because they contain the samples by which sums are divided. The flags for gradients that
    are not finite are sent last.
    """

    def __init__(self, pieces: GradientPieces, collective: RankCollective) -> None:
        self._pieces = pieces
        self._sums = piece_sums(
            collective,
            rank=pieces.rank,
            world_size=pieces.world_size,
            largest_bytes=max(pieces.facts.own.nbytes, *(piece.num_bytes for piece in pieces.pieces)),
            pin_memory=False,
        )
        self._started: deque[Callable[[Sequence[Tensor]], None]] = deque()

    @property
    def num_bytes(self) -> int:
        return self._pieces.num_bytes

    @property
    def can_overlap(self) -> bool:
        """False: the cores that compute also do the sums."""
        return False

    def overlapped(self, samples: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def average(self, samples: int, facts: Sequence[float]) -> None:
        pieces, own = self._pieces, self._pieces.facts.own
        pieces.open(samples, facts)
        self._send(own.numel(), own.dtype, pieces.pack_facts, pieces.take_facts)
        for piece in pieces.pieces:
            self._send(piece.numel, piece.dtype, partial(pieces.pack, piece), partial(pieces.settle, piece))
        self._send(pieces.world_size, torch.float32, pieces.pack_flags, pieces.take_flags)
        while self._started:
            self._receive()

    def drop_bad(self) -> None:
        self._pieces.drop_bad()

    def facts(self) -> Settled:
        return self._pieces.settled()

    def _send(
        self,
        numel: int,
        dtype: torch.dtype,
        pack: Callable[[Tensor], None],
        take: Callable[[Sequence[Tensor]], None],
    ) -> None:
        pack(self._sums.place(numel, dtype))
        self._sums.start()
        self._started.append(take)
        if len(self._started) > self._sums.depth:
            self._receive()

    def _receive(self) -> None:
        take = self._started.popleft()
        take(self._sums.finish())


PIECES_FROM_BYTES = 4 * 2**20
"""Smaller gradients are summed whole, in one round between the ranks; pieces need two rounds."""


def are_in_pieces(arena: Arena, *, is_on_cpus: bool, is_one_host: bool) -> bool:
    """Whether gradients are averaged in pieces: all ranks compute on CPUs of one host, and gradients are large.

    The answer is the same on all ranks, because they have the same layout.
    """
    num_bytes = sum(parameter.nbytes for parameter in arena.parameters)
    return is_on_cpus and is_one_host and num_bytes > PIECES_FROM_BYTES


def gradient_average(
    arena: Arena,
    collective: RankCollective,
    *,
    num_facts: int,
    device: torch.device,
    in_pieces: bool,
    timeout_s: float,
) -> GradientAverage:
    """Create the average; sums run on `device`, and all ranks must agree on `in_pieces`."""
    rank, world_size = collective.rank, collective.world_size
    if in_pieces:
        pieces = GradientPieces(arena, rank=rank, world_size=world_size, num_facts=num_facts)
        return PiecewiseGradients(pieces, collective)
    exchange = GradientExchange(arena, rank=rank, world_size=world_size, num_facts=num_facts, device=device)
    return BucketGradients(exchange, collective, timeout_s=timeout_s)
