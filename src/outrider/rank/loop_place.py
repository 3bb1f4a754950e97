"""The place in a user's loop: what the user's own checkpoints keep of it, and how a loop continues from there.

Decides which samples count as used: those that the model of the calling rank has learned from. `PassState` checks what
must be equal when a pass continues; `RankLife` handles checkpoints of the session itself.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from outrider.data.epoch_pass import EpochPass
from outrider.data.pass_state import PassState
from outrider.errors import ConfigError
from outrider.policy.effects import Lease
from outrider.policy.position_ranges import without
from outrider.policy.remaining import Remaining
from outrider.rank.driver import Driver
from outrider.rank.session_feeds import Source
from outrider.rank.user_loop import UserLoop
from outrider.world.world import World


class LoopPlace:
    """Follows the passes of a session on one rank."""

    def __init__(self, world: World, *, seed: int) -> None:
        self._world = world
        self._seed = seed
        self.loaded: PassState | None = None
        """The place where the next pass continues, from the session's own state."""
        self._ended = PassState(epoch=0)
        self._order: list[Any] = []

    def agree(self, state: PassState | None, epoch: int, *, is_counting: bool) -> PassState | None:
        """Agree on rank 0's place for the next pass; all ranks call this."""
        own, self.loaded = state or self.loaded, None
        what = f"a pass over the data in epoch {epoch}"
        told = self._world.exchange_json(own and own.as_dict(), name="states of feeds", what=what)
        if told[0] is None:
            if own is not None:
                raise ConfigError(
                    f"load_state_dict() was called on rank {self._world.rank}, but not on rank 0",
                    hint="call it on every rank, or on rank 0 only: all ranks follow rank 0",
                )
            return None
        agreed = PassState.from_dict(told[0])
        if is_counting and agreed.epoch != epoch:
            raise ConfigError(
                f"the state of s.batches() is of epoch {agreed.epoch}, the loop over s.epochs() is in epoch {epoch}",
                hint="save s.state_dict() too, and pass it to s.load_state_dict() before the loop",
            )
        return agreed

    def name_order(self, source: Source, digest: str | None) -> list[Any]:
        """The name of the order of the pass: what determines it, besides the epoch."""
        if source.sequence is not None:
            self._order = ["sequence", digest]
        elif source.shuffle:
            self._order = ["shuffled", self._seed if source.order_seed is None else source.order_seed]
        else:
            self._order = ["in order"]
        return self._order

    def rest_now(self, current: EpochPass, loop: UserLoop, driver: Driver) -> Remaining:
        """The rest of the pass, for the model of this rank; no rank waits for another."""
        if not loop.is_open:
            return current.remaining
        left = driver.left_in_segment(loop.positions_used(), is_alone=self._world.size == 1)
        if left is None:
            raise ConfigError(
                "state_dict() was called inside the loop, while every rank takes local steps: what other ranks have "
                "learned comes to this model only with the next average",
                hint="leave the loop first, on all ranks: break, feed.close(), then feed.state_dict(); or pass "
                'checkpoint_every= to the session; or policy="cadence", "sync" or "balanced"',
            )
        return current.rest_after(left)

    def end_pass(self, current: EpochPass, loop: UserLoop, driver: Driver) -> None:
        """Note that the pass ended on all ranks, at its end or by a break; all ranks call this."""
        if not driver.is_stopped:
            self._ended = PassState(epoch=current.epoch + 1)
            return
        own = [[piece.start, piece.count] for piece in loop.positions_used()]
        told = self._world.exchange_json(own, name="positions used")
        used = [Lease(start, count) for start, count in chain.from_iterable(told)]
        self._ended = self.state_of(current, current.rest_after(without(driver.span, used)))

    def state_of(self, current: EpochPass, rest: Remaining) -> PassState:
        if not rest.count:
            return PassState(epoch=current.epoch + 1)
        num_samples = current.feed.num_samples
        return PassState(epoch=current.epoch, num_samples=num_samples, remaining=rest.state(), order=self._order)

    @property
    def ended(self) -> PassState:
        """The place after the last finished pass."""
        return self._ended
