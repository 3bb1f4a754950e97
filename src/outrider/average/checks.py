"""Decides whether an average was exact, by checksums at each stage: snapshot, sum, load.

Does not change any value. Called by the averagers at each stage of a run with `verify=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.average.exchange import Exchange
from outrider.errors import VerifyError

Gather = Callable[[Sequence[int]], list[list[int]]]


class Checks(Protocol):
    """The calls of an averager to its check, in this order; `is_loaded` or `is_corrected` ends an average."""

    def begins(self, exchange: Exchange) -> None: ...

    def snapshot_is_read(self, exchange: Exchange) -> None: ...

    def is_summed(self, exchange: Exchange, segments: Sequence[Tensor]) -> None:
        """Called for each piece, in order."""

    def is_applied(self, exchange: Exchange) -> None: ...

    def is_prepared(self, exchange: Exchange) -> None: ...

    def is_loaded(self, exchange: Exchange) -> None: ...

    def is_corrected(self, exchange: Exchange) -> None: ...


class Unchecked:
    """Does nothing; used in runs without `verify=True`."""

    def begins(self, exchange: Exchange) -> None:
        pass

    def is_summed(self, exchange: Exchange, segments: Sequence[Tensor]) -> None:
        pass

    snapshot_is_read = is_applied = is_prepared = is_loaded = is_corrected = begins


class Verifier:
    """Raises a VerifyError that names rank, window and stage as soon as a checksum differs.

    `gather` returns the integers of every rank, as GroupCollective.gather does. It is called once per average, after
    the sum and in the same order on all ranks, so that every rank learns of a mismatch on any rank. `window` counts
    averages from 0.
    """

    def __init__(self, rank: int, gather: Gather) -> None:
        self.rank = rank
        self.window = -1
        self._gather = gather
        self._arena = self._snapshot = self._sum = self._ref = self._correction = 0

    def begins(self, exchange: Exchange) -> None:
        self.window += 1
        self._sum = 0
        # A buffer that was assigned anew moves into the arena now, not between this checksum and the snapshot.
        exchange.reclaim()
        self._arena = _arena_checksum(exchange)

    def snapshot_is_read(self, exchange: Exchange) -> None:
        self._snapshot = _snapshot_checksum(exchange)

    def is_summed(self, exchange: Exchange, segments: Sequence[Tensor]) -> None:
        start = 0
        for segment in segments:
            # Multiply by an odd number, so that the checksum changes if pieces are swapped.
            self._sum = _wrap(3 * self._sum + checksum(segment, start=start))
            start += segment.numel()

    def is_applied(self, exchange: Exchange) -> None:
        self._ref = _ref_checksum(exchange)
        rows = self._gather([self._arena, self._snapshot, self._sum, self._ref])
        for rank, (arena, snapshot, _, _) in enumerate(rows):
            self._compare(rank, "snapshot", arena=arena, snapshot=snapshot)
        for rank, (_, _, summed, ref) in enumerate(rows):
            self._compare(rank, "sum", rank_0=rows[0][2], here=summed)
            self._compare(rank, "sum", rank_0_mean=rows[0][3], mean_here=ref)

    def is_prepared(self, exchange: Exchange) -> None:
        self._correction = _snapshot_checksum(exchange)

    def is_loaded(self, exchange: Exchange) -> None:
        # The mean is already known to be identical on all ranks, so comparing with it is enough.
        self._compare(self.rank, "load", mean=_ref_checksum(exchange), arena=_arena_checksum(exchange))

    def is_corrected(self, exchange: Exchange) -> None:
        self._compare(self.rank, "load", mean_when_settled=self._ref, mean=_ref_checksum(exchange))
        correction = _snapshot_checksum(exchange)
        self._compare(self.rank, "load", correction_when_prepared=self._correction, correction=correction)

    def _compare(self, rank: int, stage: str, **sums: int) -> None:
        if len(set(sums.values())) > 1:
            found = ", ".join(f"{name} {value & (2**64 - 1):016x}" for name, value in sums.items())
            raise VerifyError(
                f"rank {rank}, window {self.window}: checksum mismatch at stage '{stage}': {found}",
                hint="memory was written while an average read it: report this with the run folder",
                rank=rank,
            )


def checksum(values: Tensor, *, start: int = 0) -> int:
    """A checksum that is exact in any summation order: the sum of each element's bits times an odd number per index."""
    bits = values.detach().view(torch.int64 if values.element_size() == 8 else torch.int32)
    weights = torch.arange(start, start + values.numel(), dtype=torch.int64, device=values.device).mul_(2).add_(1)
    return int(weights.mul_(bits).sum())


def _arena_checksum(exchange: Exchange) -> int:
    return _wrap(
        sum(
            checksum(section.source.to(part.plan.dtype), start=section.start)
            for part in exchange.parts
            for section in part.plan.sections
        )
    )


def _snapshot_checksum(exchange: Exchange) -> int:
    """The checksum of the snapshot buffers; the correction later overwrites them."""
    return _wrap(sum(checksum(part.snapshot) for part in exchange.parts))


def _ref_checksum(exchange: Exchange) -> int:
    """The checksum of the values that the arena gets, rounded to its dtypes."""
    return _wrap(
        sum(
            checksum(section.of(part.ref).to(section.source.dtype).to(part.plan.dtype), start=section.start)
            for part in exchange.parts
            for section in part.plan.sections
        )
    )


def _wrap(value: int) -> int:
    """Reduce modulo 2**64 to a signed integer, so that it fits into an int64 tensor."""
    return (value + 2**63) % 2**64 - 2**63
