"""The ledger of a segment in the store that all ranks share: every position is handed out exactly once.

Decides how ranks that ask at the same time are told apart; who gets how much is `core.ledger`.
"""

from __future__ import annotations

import json
from typing import Protocol

from outrider.core.effects import Lease, Take
from outrider.core.ledger import Ledger


class Store(Protocol):
    """What is needed of a torch store: an exchange that answers with the value now in force."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class Leases(Protocol):
    """Where a rank gets its positions from."""

    def take(self, effect: Take) -> Lease | None: ...


class OpenLeases(Protocol):
    """Opens the ledger of a span of positions; ranks that use the same key share it."""

    def __call__(self, key: str, span: Lease, *, batch_size: int) -> Leases: ...


class LocalLeases:
    """A world of one needs no store."""

    def __init__(self, span: Lease, *, batch_size: int) -> None:
        self._ledger = Ledger(span.start, span.stop)
        self._batch_size = batch_size
        self._held: Lease | None = None

    def take(self, effect: Take) -> Lease | None:
        if self._held is not None:
            self._ledger.done(0, self._held)
        self._held = self._ledger.take(0, effect.samples, share=1.0, batch_size=self._batch_size)
        return self._held


class StoreLeases:
    """One rank's access to the shared ledger; asking for the next lease acknowledges the last."""

    def __init__(self, store: Store, key: str, span: Lease, *, rank: int, batch_size: int) -> None:
        self._store = store
        self._key = key
        self._rank = rank
        self._batch_size = batch_size
        self._untouched = json.dumps(Ledger(span.start, span.stop).state())
        self._seen: str | None = None
        self._held: Lease | None = None

    def take(self, effect: Take) -> Lease | None:
        seen = self._seen or self._store.compare_set(self._key, "", self._untouched).decode()
        while True:
            lease, desired = self._taken(json.loads(seen), effect)
            now = self._store.compare_set(self._key, seen, desired).decode()
            if now == desired:
                self._seen, self._held = now, lease
                return lease
            # Somebody else was here since: look again at what is left.
            seen = now

    def _taken(self, state: dict[str, object], effect: Take) -> tuple[Lease | None, str]:
        ledger = Ledger.restored(state)
        if self._held is not None:
            ledger.done(self._rank, self._held)
        lease = ledger.take(self._rank, effect.samples, share=effect.share, batch_size=self._batch_size)
        return lease, json.dumps(ledger.state())
