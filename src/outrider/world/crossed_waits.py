"""Detects ranks that wait for each other at different points, which otherwise would end only with the timeout.

A rank that waits for a while writes to the store at which meeting it waits. If it finds another rank at a meeting that
it has not reached itself, neither can continue. This happens if only some ranks call a method that all must call.
Called by World.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.world.rendezvous import await_keys
from outrider.world.store import WatchedStore

FIRST_TURN_S = 0.5
"""A rank that waits for less than this time writes nothing."""
LONGEST_TURN_S = 4.0
_HINT = (
    "call the methods of a session on every rank, in the same order and outside of the loop over batches(); under "
    "`if s.is_main:` use evaluate() instead of evaluate_together(); leave loops together: if any(s.gather(stop)): break"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """A point that all ranks must reach: its place, the number of meetings there so far, and its purpose."""

    place: str
    number: int
    what: str

    def key(self, rank: int) -> str:
        return f"{self.place}/{self.number}/{rank}"


def announce(store: WatchedStore, meeting: Meeting, *, rank: int) -> None:
    """Tell the other ranks that this meeting is the next one of this rank."""
    store.set(_announcement(rank), json.dumps([meeting.place, meeting.number, meeting.what]))


def await_all(
    store: WatchedStore, meeting: Meeting, *, rank: int, world_size: int, reached: Mapping[str, int], limit_s: float
) -> None:
    """Wait until all ranks have arrived; `reached` has this rank's last meeting at each place.

    Raises a ConfigError at once if another rank waits for this rank at another meeting.
    """
    keys = [meeting.key(other) for other in range(world_size)]
    deadline_s = time.monotonic() + limit_s
    turn_s = FIRST_TURN_S
    while (left_s := deadline_s - time.monotonic()) > turn_s:
        if store.are_set(keys, limit_s=turn_s):
            return
        announce(store, meeting, rank=rank)
        for other, key in enumerate(keys):
            crossing = None if store.check([key]) else _crossing(store, other, reached)
            # The other rank may have arrived and left while its announcement was read.
            if crossing is not None and not store.check([key]):
                raise _never_met({rank: meeting.what, other: crossing.what})
        turn_s = min(2 * turn_s, LONGEST_TURN_S)
    await_keys(store, keys, rank=rank, what=meeting.what, limit_s=max(left_s, 0.0), told_s=limit_s)


def lead(store: WatchedStore, what: str, *, number: int) -> None:
    """Rank 0 tells that its loop now comes to `what`; the other ranks wait for that in `follow`."""
    store.set(_lead_key(number), json.dumps(what))
    if number > 2:
        # All ranks meet after at most two words, the end of an epoch and a pass, so they have read older ones.
        store.delete_key(_lead_key(number - 2))


def follow(
    store: WatchedStore, what: str, *, rank: int, number: int, reached: Mapping[str, int] | None, limit_s: float
) -> bool:
    """Wait until rank 0 tells where its loop comes to; returns whether that is `what`.

    Also returns False if rank 0 announces that it waits at a meeting outside of the loop, which this rank has not
    `reached` (None where ranks announce nothing). This wait is not announced: for rank 0 it is no crossing.
    """
    key = _lead_key(number)
    deadline_s = time.monotonic() + limit_s
    turn_s = FIRST_TURN_S
    while (left_s := deadline_s - time.monotonic()) > turn_s and reached is not None:
        if store.are_set([key], limit_s=turn_s):
            return bool(json.loads(store.get(key)) == what)
        # Rank 0 may have told where it goes on while its announcement was read.
        if _crossing(store, 0, reached) is not None and not store.check([key]):
            return False
        turn_s = min(2 * turn_s, LONGEST_TURN_S)
    await_keys(store, [key], rank=rank, what=what, limit_s=max(left_s, 0.0), told_s=limit_s)
    return bool(json.loads(store.get(key)) == what)


def _crossing(store: WatchedStore, rank: int, reached: Mapping[str, int]) -> Meeting | None:
    """The meeting at which another rank waits, if this rank has not reached it."""
    if not store.check([_announcement(rank)]):
        return None
    place, number, what = json.loads(store.get(_announcement(rank)))
    # An announcement is outdated if this rank has reached the meeting too.
    return None if number <= reached.get(place, 0) else Meeting(place=place, number=number, what=what)


def _never_met(waits: Mapping[int, str]) -> ConfigError:
    first, second = sorted(waits)
    return ConfigError(
        f"rank {first} waits for {waits[first]}, rank {second} for {waits[second]}: they would never meet", hint=_HINT
    )


def _lead_key(number: int) -> str:
    return f"lead/{number}"


def _announcement(rank: int) -> str:
    return f"waits/{rank}"
