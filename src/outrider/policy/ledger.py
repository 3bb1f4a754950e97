"""Hands out the positions of an epoch segment as leases, each exactly once, smaller towards the end.

Does not decide the length of a window; a policy requests an amount and gets at most its fair share. Called by the
drivers for the effect Take; its state fits into one key of a store.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from outrider.policy.effects import Lease, num_batches

# A share of exactly zero would need infinite time for one batch.
SHARE_MIN = 1e-9
# A batch that finishes only just in time does not count, so equal ranks never wait for each other.
JUST_IN_TIME = 1e-6


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank that has a lease and will ask again: its share of the speed, and samples it may still have to do."""

    share: float
    samples: int


def lease_size(wanted: int, remaining: int, *, share: float, batch_size: int, others: Collection[Holder] = ()) -> int:
    """Samples to give to a rank that asks; 0 leaves the rest to `others`, which are sorted from the fastest on.

    Guided self-scheduling: half of the rank's fair share of the rest, in whole batches, at least one. None at all if
    the others, after their present leases, finish every remaining batch in the time this rank needs for one.
    Only holders count, and a holder asks again. So the last rank to ask is never refused and no position is left
    behind, whatever ranks believe about their shares. The fastest is never refused while the others are at work.
    Up to three ranks finish within one batch of the slowest. With more ranks, two may count on the same third one;
    they then rarely finish up to a fifth later.
    """
    if wanted <= 0 or remaining <= 0:
        return 0
    # A single sample is never left over, so the last batch may have one more.
    first = remaining if num_batches(remaining, batch_size) == 1 else min(wanted, batch_size)
    if _others_are_sooner(first, remaining, share=share, batch_size=batch_size, others=others):
        return 0
    return min(wanted, remaining, _fair(share, remaining, batch_size))


def _fair(share: float, remaining: int, batch_size: int) -> int:
    return max(1, int(share * remaining / 2 / batch_size)) * batch_size


def _others_are_sooner(
    first: int, remaining: int, *, share: float, batch_size: int, others: Collection[Holder]
) -> bool:
    # Time is counted in samples of the whole world: a rank needs samples / share.
    mine = first / max(share, SHARE_MIN)
    if remaining >= mine:
        return False
    num_left = num_batches(remaining, batch_size)
    unit = remaining if num_left == 1 else batch_size
    is_pair = len(others) == 1
    # A rank with a smaller share does not finish a batch in the time that this rank needs.
    least_share = (unit if is_pair else unit + batch_size) / mine
    # Thousands of simulated ranks check thousands of others here, so the loop is kept tight.
    for other in others:
        speed, held = other.share, other.samples
        if speed < least_share:
            return False
        if is_pair:
            busy = held
        else:
            # How much of its lease this other rank has done is unknown, and a third rank may take a batch that late.
            fair = _fair(speed, remaining, batch_size) if speed * remaining >= 4 * batch_size else batch_size
            busy = held + (held if held > fair else fair)
        num_in_time = (mine - busy / (speed if speed > SHARE_MIN else SHARE_MIN)) * speed / unit - JUST_IN_TIME
        if num_in_time >= 1:
            num_left -= int(num_in_time)
            if num_left <= 0:
                return True
    return False


class _Holders:
    """Holders by rank and sorted by speed: of thousands, only fast ones need to be checked."""

    def __init__(self) -> None:
        self._by_rank: dict[int, Holder] = {}
        self._by_speed: list[tuple[float, int]] = []

    def __getitem__(self, rank: int) -> Holder:
        return self._by_rank[rank]

    def __contains__(self, rank: int) -> bool:
        return rank in self._by_rank

    def __setitem__(self, rank: int, holder: Holder) -> None:
        before = self._by_rank.get(rank)
        if before is None or before.share != holder.share:
            self.discard(rank)
            insort(self._by_speed, (-holder.share, rank))
        self._by_rank[rank] = holder

    def discard(self, rank: int) -> None:
        holder = self._by_rank.pop(rank, None)
        if holder is not None:
            del self._by_speed[bisect_left(self._by_speed, (-holder.share, rank))]

    def others(self, rank: int) -> Collection[Holder]:
        """All holders but this one, the fastest first."""
        return _Others(self._by_rank, self._by_speed, rank)

    def items(self) -> Collection[tuple[int, Holder]]:
        return self._by_rank.items()


class _Others(Collection[Holder]):
    def __init__(self, by_rank: dict[int, Holder], by_speed: list[tuple[float, int]], rank: int) -> None:
        self._by_rank, self._by_speed, self._rank = by_rank, by_speed, rank

    def __len__(self) -> int:
        return len(self._by_rank) - (self._rank in self._by_rank)

    def __iter__(self) -> Iterator[Holder]:
        return (self._by_rank[rank] for _, rank in self._by_speed if rank != self._rank)

    def __contains__(self, holder: object) -> bool:
        return any(holder == other for other in self)


class Ledger:
    """Leases of the positions [start, stop): handed out, acknowledged, or lost and handed out again."""

    def __init__(self, start: int, stop: int) -> None:
        self._free = [Lease(start, stop - start)] if stop > start else []
        self._leases: dict[int, list[Lease]] = {}
        self._holders = _Holders()

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
        """Lease up to `samples` positions to a rank that finished its lease; None: the rank need not ask again.

        The lease has one more if a single sample would be left over; its last batch is then one larger.
        """
        others = self._holders.others(rank)
        size = lease_size(samples, self.remaining, share=share, batch_size=batch_size, others=others)
        if size == 0:
            self._holders.discard(rank)
            return None
        lease = self._cut(size, least_left=min(2, batch_size))
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

    def give_back(self, rank: int, lease: Lease, rest: Lease) -> None:
        """Return `rest`, the end of a lease, which is handed out again first; the part before it was done."""
        assert rest.stop == lease.stop, f"rank {rank} gave {rest} back, which does not end as {lease} does"
        self.done(rank, lease)
        self._holders.discard(rank)
        self._free = sorted([rest, *self._free], key=lambda piece: piece.start)

    @property
    def free(self) -> tuple[Lease, ...]:
        """The ranges not handed out, in order."""
        return tuple(self._free)

    def lose(self, rank: int) -> None:
        """Take back the unacknowledged leases of a rank that is gone; they are handed out again first."""
        self._holders.discard(rank)
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
        for rank, (share, samples) in state["holders"].items():
            ledger._holders[int(rank)] = Holder(share, samples)
        return ledger

    def _cut(self, size: int, *, least_left: int) -> Lease:
        piece = self._free[0]
        lease = Lease(piece.start, size if piece.count - size >= least_left else piece.count)
        left = Lease(lease.stop, piece.count - lease.count)
        self._free[:1] = [left] if left.count else []
        return lease
