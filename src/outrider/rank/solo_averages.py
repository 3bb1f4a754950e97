"""The averages of a world of one rank: returns its own facts and leaves its parameters bit-identical.

Decides nothing. Called by the driver and `RankLife`, like the averages of a group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

from outrider.average.rank_facts import Settled
from outrider.rank.layout_watch import LayoutSizes, LayoutWatch, NewLayout, sizes_of, wait_for
from outrider.replica.rank_replica import RankReplica


class SoloAverages:
    """A world of one."""

    transport = "none"
    watches_gradients = False

    def __init__(self, replica: RankReplica) -> None:
        self._replica = replica
        self._layout = LayoutWatch(replica, None)
        self._begun: Settled | None = None

    @property
    def sizes(self) -> LayoutSizes:
        return sizes_of(self._replica.arena)

    @property
    def is_unmerged(self) -> bool:
        return False

    def start_from_rank_zero(self) -> None: ...

    def average(self, samples: int, facts: Sequence[float]) -> Settled:
        return Settled(facts=(tuple(facts),), total_samples=samples, drift=0.0)

    @property
    def can_overlap(self) -> bool:
        return False

    def overlapped(self, samples: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def average_gradients(self, samples: int, facts: Sequence[float]) -> None:
        self._begun = self.average(samples, facts)

    def drop_bad_gradients(self) -> None: ...

    def gradient_facts(self) -> Settled:
        return self.load()

    def refuse_not_finite(self, settled: Settled, *, step: int, scaled: Collection[int] = ()) -> None: ...

    def begin(self, samples: int, facts: Sequence[float]) -> None:
        self._begun = self.average(samples, facts)

    def is_ready(self) -> bool:
        return True

    def load(self) -> Settled:
        assert self._begun is not None
        return self._begun

    correct = load

    def confer(self, samples: int, facts: Sequence[float]) -> Settled:
        return self.average(samples, facts)

    def hand_over(self, source: int, *, at: int, with_loop: bool = False) -> None: ...

    def move_to_lookahead(self) -> None: ...

    def move_to_average(self) -> None: ...

    def merge(self, samples: int, facts: Sequence[float], *, may_undo: bool) -> Settled:
        return self.average(samples, facts)

    def undo_merge(self) -> None: ...

    def wait_for_device(self) -> None:
        wait_for(self._replica.device)

    def saw_gradients(self) -> None:
        self._layout.saw_gradients()

    def stepped(self) -> None:
        self._layout.stepped()

    def wants_layout(self, *, is_thorough: bool = False) -> bool:
        return self._layout.wants_change()

    def ended(self) -> None:
        self._layout.ended()

    def lay_out(self, *, catch_up: Callable[[], int | None], is_within_pass: bool) -> NewLayout:
        """Apply layout changes; thawed parameters are clipped and watched from now on as well."""
        agreed = self._layout.agree(is_within_pass=is_within_pass)
        if agreed.is_new:
            self.lay_out_as(changing=(), trained=agreed.trained)
        return agreed

    def lay_out_as(self, *, changing: Sequence[str], trained: Sequence[str] | None = None) -> None:
        self._replica.lay_out(changing=changing, trained=trained)
        self._layout.restart()

    def state(self) -> dict[str, Any] | None:
        return None

    def restore(self, state: dict[str, Any] | None) -> None: ...

    def close(self) -> None: ...
