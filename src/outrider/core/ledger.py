"""Hands out the positions of an epoch segment as leases, each exactly once, smaller towards the end.

Does not decide how long a window is; a policy asks for what it wants and gets no more than is fair.
Called by the drivers for the effect Take; its state is small enough to live in one key of a store.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.effects import Lease

# A share of exactly zero would need an endless time for one batch.
SHARE_MIN = 1e-9
# A batch that is finished only just in time does not count, so equal ranks never wait for each other.
JUST_IN_TIME = 1e-6


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank that was given a lease and will ask again: its share of the speed, and what it may still have to do."""

    share: float
    samples: int


def lease_size(wanted: int, remaining: int, *, share: float, batch_size: int, others: Sequence[Holder] = ()) -> int:
    """Samples to give to a rank that asks; 0 leaves all that remain to the others.

    Guided self-scheduling: half of the rank's fair share of what is left, in whole batches, at least one. None at all
    where the others, after the leases they hold, do every remaining batch in the time this rank needs for one.
    Only holders count, and a holder asks again: so the last to ask is never refused and no position is left behind,
    whatever the ranks believe about their shares. The fastest is never refused while the others are at work.
    Up to three ranks finish within one batch of the slowest. Of more, two may count on the same other, and are seldom
    up to a fifth later.
    """
    if wanted <= 0 or remaining <= 0:
        return 0
    first = min(wanted, remaining, batch_size)
    if _others_are_sooner(first, remaining, share=share, batch_size=batch_size, others=others):
        return 0
    return min(wanted, remaining, _fair(share, remaining, batch_size))


def _fair(share: float, remaining: int, batch_size: int) -> int:
    return max(1, int(share * remaining / 2 / batch_size)) * batch_size


def _others_are_sooner(first: int, remaining: int, *, share: float, batch_size: int, others: Sequence[Holder]) -> bool:
    # Time is counted in samples of the whole world: a rank does its samples in samples / share.
    mine = first / max(share, SHARE_MIN)
    if remaining >= mine:
        return False
    num_batches = math.ceil(remaining / batch_size)
    for other in others:
        busy = other.samples
        if len(others) > 1:
            # A third rank cannot see how much of its lease this one has done, and may take a batch that late.
            busy += max(other.samples, _fair(other.share, remaining, batch_size))
        free = mine - busy / max(other.share, SHARE_MIN)
        num_batches -= max(0, math.floor(free * other.share / min(batch_size, remaining) - JUST_IN_TIME))
        if num_batches <= 0:
            return True
    return False


class Ledger:
    """The leases of the positions [start, stop): handed out, acknowledged, or lost and handed out again."""

    def __init__(self, start: int, stop: int) -> None:
        self._free = [Lease(start, stop - start)] if stop > start else []
        self._leases: dict[int, list[Lease]] = {}
        self._holders: dict[int, Holder] = {}

    @property
    def remaining(self) -> int:
        """Samples not handed out."""
        return sum(piece.count for piece in self._free)

    @property
    def outstanding(self) -> int:
        """Samples handed out and not acknowledged."""
        return sum(lease.count for leases in self._leases.values() for lease in leases)

    @property
    def is_done(self) -> bool:
        return self.remaining == 0 and self.outstanding == 0

    def take(self, rank: int, samples: int, *, share: float, batch_size: int) -> Lease | None:
        """Lease up to `samples` positions to a rank that has done what it had; None: it need not ask again."""
        others = [holder for other, holder in self._holders.items() if other != rank]
        size = lease_size(samples, self.remaining, share=share, batch_size=batch_size, others=others)
        if size == 0:
            self._holders.pop(rank, None)
            return None
        lease = self._cut(size)
        self._leases.setdefault(rank, []).append(lease)
        self._holders[rank] = Holder(share, lease.count)
        return lease

    def done(self, rank: int, lease: Lease) -> None:
        """Acknowledge a lease: its batches are in the model for good."""
        leases = self._leases.get(rank, [])
        assert lease in leases, f"rank {rank} acknowledged {lease}, which it does not hold"
        leases.remove(lease)
        if not leases and rank in self._holders:
            self._holders[rank] = Holder(self._holders[rank].share, 0)

    def lose(self, rank: int) -> None:
        """A rank is gone: what it did not acknowledge is handed out again, before anything else."""
        self._holders.pop(rank, None)
        self._free = sorted(self._leases.pop(rank, []) + self._free, key=lambda piece: piece.start)

    def state(self) -> dict[str, Any]:
        return {
            "free": [[piece.start, piece.count] for piece in self._free],
            "leases": {
                str(rank): [[lease.start, lease.count] for lease in held] for rank, held in self._leases.items()
            },
            "holders": {str(rank): [holder.share, holder.samples] for rank, holder in self._holders.items()},
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Ledger:
        ledger = cls(0, 0)
        ledger._free = [Lease(start, count) for start, count in state["free"]]
        ledger._leases = {
            int(rank): [Lease(start, count) for start, count in held] for rank, held in state["leases"].items()
        }
        ledger._holders = {int(rank): Holder(share, samples) for rank, (share, samples) in state["holders"].items()}
        return ledger

    def _cut(self, size: int) -> Lease:
        piece = self._free[0]
        lease = Lease(piece.start, min(size, piece.count))
        left = Lease(lease.stop, piece.count - lease.count)
        self._free[:1] = [left] if left.count else []
        return lease
