"""Hands out the positions of an epoch segment as leases, each exactly once, smaller towards the end.

Does not decide how long a window is; a policy asks for what it wants and gets no more than is fair.
Called by the virtual-clock drivers for the effect Take; the runtime uses `lease_size` on a cursor in its store.
"""

from __future__ import annotations

from typing import Any

from outrider.core.effects import Lease

# A share of exactly zero would need an endless time for one batch.
SHARE_MIN = 1e-9


def lease_size(
    wanted: int, remaining: int, *, share: float, batch_size: int, is_fastest: bool, world_size: int | None = None
) -> int:
    """Samples to give to a rank that asks; 0 leaves all that remain to the others.

    Guided self-scheduling: half of the rank's fair share of what is left, in whole batches, at least one. None at
    all to a rank so slow that the others are done before it could finish one batch; never refused are the fastest
    rank and, in a world of unknown size, all. Ranks may disagree for a moment on who is fastest, so whoever hands
    out leases must also see to it that the last rank still asking is not refused, as Ledger does.
    """
    if wanted <= 0 or remaining <= 0:
        return 0
    if world_size is not None and not is_fastest:
        first = min(wanted, remaining, batch_size)
        if _others_are_sooner(first, remaining, share=share, batch_size=batch_size, world_size=world_size):
            return 0
    fair_batches = int(share * remaining / 2 / batch_size)
    return min(wanted, remaining, max(1, fair_batches) * batch_size)


def _others_are_sooner(first: int, remaining: int, *, share: float, batch_size: int, world_size: int) -> bool:
    """Whether an average one of the others, and so surely the fastest, is through before this rank does `first`."""
    if world_size == 1:
        return False
    # It may just have taken a lease: a batch, or half its share of what was left, so at most as much as is left now.
    in_flight = max(batch_size, remaining)
    average_share = (1 - share) / (world_size - 1)
    return (remaining + in_flight) * max(share, SHARE_MIN) < first * average_share


class Ledger:
    """The leases of the positions [start, stop): handed out, acknowledged, or lost and handed out again."""

    def __init__(self, start: int, stop: int, *, world_size: int | None = None) -> None:
        self._world_size = world_size
        self._free = [Lease(start, stop - start)] if stop > start else []
        self._leases: dict[int, list[Lease]] = {}
        # Ranks that will not ask again.
        self._refused: set[int] = set()
        self._lost: set[int] = set()

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

    def take(self, rank: int, samples: int, *, share: float, batch_size: int, is_fastest: bool) -> Lease | None:
        """Lease up to `samples` positions; None: nothing is left for this rank and it need not ask again."""
        self._refused.discard(rank)
        self._lost.discard(rank)
        num_away = len(self._refused | self._lost)
        size = lease_size(
            samples,
            self.remaining,
            share=share,
            batch_size=batch_size,
            is_fastest=is_fastest or num_away + 1 == self._world_size,
            world_size=self._world_size,
        )
        if size == 0:
            self._refused.add(rank)
            return None
        lease = self._cut(size)
        self._leases.setdefault(rank, []).append(lease)
        return lease

    def done(self, rank: int, lease: Lease) -> None:
        """Acknowledge a lease: its batches are in the model for good."""
        leases = self._leases.get(rank, [])
        assert lease in leases, f"rank {rank} acknowledged {lease}, which it does not hold"
        leases.remove(lease)

    def lose(self, rank: int) -> None:
        """A rank is gone: what it did not acknowledge is handed out again, before anything else."""
        # The others start over with what came back, also those that had nothing left to do.
        self._refused.clear()
        self._lost.add(rank)
        self._free = sorted(self._leases.pop(rank, []) + self._free, key=lambda piece: piece.start)

    def state(self) -> dict[str, Any]:
        return {
            "world_size": self._world_size,
            "free": [[piece.start, piece.count] for piece in self._free],
            "leases": {
                str(rank): [[lease.start, lease.count] for lease in held] for rank, held in self._leases.items()
            },
            "refused": sorted(self._refused),
            "lost": sorted(self._lost),
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Ledger:
        ledger = cls(0, 0, world_size=state["world_size"])
        ledger._free = [Lease(start, count) for start, count in state["free"]]
        ledger._leases = {
            int(rank): [Lease(start, count) for start, count in held] for rank, held in state["leases"].items()
        }
        ledger._refused = set(state["refused"])
        ledger._lost = set(state["lost"])
        return ledger

    def _cut(self, size: int) -> Lease:
        piece = self._free[0]
        lease = Lease(piece.start, min(size, piece.count))
        left = Lease(lease.stop, piece.count - lease.count)
        self._free[:1] = [left] if left.count else []
        return lease
