"""The rendezvous of the ranks of one attempt in a store that may contain keys of earlier attempts.

Decides the name of the attempt, which is equal on all its ranks and was never used before. Each torchrun agent counts
its own restarts, so torchrun's variables cannot name the attempt. Called by World before anything else is exchanged.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence

from outrider.errors import WaitError
from outrider.world.store import WatchedStore

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.25
_WHAT = "all ranks to start"


def meet(store: WatchedStore, *, rank: int, world_size: int, timeout_s: float) -> str:
    """Return the name of this attempt; all ranks call this, and it returns when all have arrived.

    Rank 0 opens an attempt, the other ranks answer with a random token, and rank 0 publishes all tokens. A restarted
    rank does not find its token in an old attempt, so it waits until rank 0 opens the next one.
    """
    token = uuid.uuid4().hex
    if rank == 0:
        return _open_attempt(store, token, world_size=world_size, timeout_s=timeout_s)
    return _join_attempt(store, token, rank=rank, world_size=world_size, timeout_s=timeout_s)


def _open_attempt(store: WatchedStore, token: str, *, world_size: int, timeout_s: float) -> str:
    store.set("attempt", token)
    store.set(_seat(token, 0), token)
    seats = [_seat(token, rank) for rank in range(world_size)]
    await_keys(store, seats, rank=0, what=_WHAT, limit_s=timeout_s)
    store.set(_members(token), json.dumps([store.get(seat).decode() for seat in seats]))
    return token


def _join_attempt(store: WatchedStore, token: str, *, rank: int, world_size: int, timeout_s: float) -> str:
    deadline_s = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    seen = None
    while time.monotonic() < deadline_s:
        attempt = store.get("attempt").decode() if store.check(["attempt"]) else None
        if attempt is not None and attempt != seen:
            store.set(_seat(attempt, rank), token)
            seen, pause_s = attempt, _FIRST_PAUSE_S
        if attempt is not None and _has_member(store, attempt, token, rank):
            return attempt
        # Poll instead of store.wait(), which would not see rank 0 open another attempt; torch also logs its timeouts.
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    is_open = seen is not None and not store.check([_members(seen)])
    absent = _absent(store, [_seat(seen or "", other) for other in range(world_size)]) if is_open else []
    raise _too_late(absent or [0], rank=rank, what=_WHAT, limit_s=timeout_s)


def _has_member(store: WatchedStore, attempt: str, token: str, rank: int) -> bool:
    if not store.check([_members(attempt)]):
        return False
    members: list[str] = json.loads(store.get(_members(attempt)))
    return rank < len(members) and members[rank] == token


def _seat(attempt: str, rank: int) -> str:
    return f"{attempt}/seat/{rank}"


def _members(attempt: str) -> str:
    return f"{attempt}/members"


def await_keys(
    store: WatchedStore, keys: list[str], *, rank: int, what: str, limit_s: float, told_s: float | None = None
) -> None:
    """Wait for a key of every rank, in order; `what` describes the wait in error messages.

    `told_s` is the length of the whole wait for the error message, if a part of it has passed already.
    """
    absent = [] if store.are_set(keys, limit_s=limit_s) else _absent(store, keys)
    if absent:
        raise _too_late(absent, rank=rank, what=what, limit_s=limit_s if told_s is None else told_s)


def _absent(store: WatchedStore, keys: list[str]) -> list[int]:
    return [rank for rank, key in enumerate(keys) if not store.check([key])]


def _too_late(absent: Sequence[int], *, rank: int, what: str, limit_s: float) -> WaitError:
    """The error of a rank that waited for other ranks until the timeout."""
    return WaitError(
        f"rank {rank} waited {limit_s:g} s for {what}, "
        f"rank{'' if len(absent) == 1 else 's'} {', '.join(map(str, absent))} did not come",
        hint="see the logs of the missing ranks",
        rank=absent[0],
    )
