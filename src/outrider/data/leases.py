"""Leases from a segment's shared ledger in the store, which hands out every position exactly once.

Resolves concurrent requests by compare-and-set; `policy.ledger` decides how many positions a rank gets.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol, TypeVar

from outrider.policy.effects import Lease, Take
from outrider.policy.ledger import Ledger

Result = TypeVar("Result")


class LeaseStore(Protocol):
    """The part of a torch store that leases use: a compare-and-set that returns the current value."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class Leases(Protocol):
    """The source of a rank's positions."""

    def take(self, effect: Take) -> Lease | None: ...

    def give_back(self, rest: Lease) -> None:
        """Return the unused end of the last lease to the ledger, for other ranks or the next segment."""

    def left(self) -> tuple[Lease, ...]:
        """The positions that were not handed out; call this after all ranks have ended the segment."""


class OpenLeases(Protocol):
    """Opens the ledger of a span of positions; ranks with the same key share it."""

    def __call__(self, key: str, span: Lease, *, batch_size: int) -> Leases: ...


class LocalLeases:
    """The ledger of a single rank, without a store."""

    def __init__(self, span: Lease, *, batch_size: int) -> None:
        self._ledger = Ledger(span.start, span.stop)
        self._batch_size = batch_size
        self._held: Lease | None = None

    def take(self, effect: Take) -> Lease | None:
        if self._held is not None:
            self._ledger.done(0, self._held)
        self._held = self._ledger.take(0, effect.samples, share=1.0, batch_size=self._batch_size)
        return self._held

    def give_back(self, rest: Lease) -> None:
        assert self._held is not None, "only what was taken can be given back"
        self._ledger.give_back(0, self._held, rest)
        self._held = None

    def left(self) -> tuple[Lease, ...]:
        return self._ledger.free


class StoreLeases:
    """One rank's access to the shared ledger; taking a lease acknowledges the previous one."""

    def __init__(self, store: LeaseStore, key: str, span: Lease, *, rank: int, batch_size: int) -> None:
        self._store = store
        self._key = key
        self._rank = rank
        self._batch_size = batch_size
        self._untouched = json.dumps(Ledger(span.start, span.stop).state())
        self._seen: str | None = None
        self._held: Lease | None = None

    def take(self, effect: Take) -> Lease | None:
        """Take the next lease; returns None if nothing is left for this rank."""

        def taken(ledger: Ledger) -> Lease | None:
            if self._held is not None:
                ledger.done(self._rank, self._held)
            return ledger.take(self._rank, effect.samples, share=effect.share, batch_size=self._batch_size)

        self._held = self._change(taken)
        return self._held

    def give_back(self, rest: Lease) -> None:
        held = self._held
        assert held is not None, "only what was taken can be given back"
        self._change(lambda ledger: ledger.give_back(self._rank, held, rest))
        self._held = None

    def left(self) -> tuple[Lease, ...]:
        return self._change(lambda ledger: ledger.free)

    def _change(self, change: Callable[[Ledger], Result]) -> Result:
        """Apply a change to the shared ledger; retries if another rank changed it first."""
        seen = self._seen or self._store.compare_set(self._key, "", self._untouched).decode()
        while True:
            ledger = Ledger.restored(json.loads(seen))
            result = change(ledger)
            desired = json.dumps(ledger.state())
            now = self._store.compare_set(self._key, seen, desired).decode()
            if now == desired:
                self._seen = now
                return result
            seen = now
