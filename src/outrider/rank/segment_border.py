"""Lets ranks wait for each other after their last step of a segment, while averages continue in the background.

Decides when all ranks have arrived, and what they then agree on. Called by the driver for the effect AwaitOthers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from outrider.policy.effects import Border
from outrider.world.crossed_waits import Meeting
from outrider.world.world import World

FIRST_PAUSE_S = 2e-4
LONGEST_PAUSE_S = 5e-3
"""Longest pause between two checks, so that a waiting rank keeps neither a core nor the store busy."""


class SegmentBorder:
    """Takes one rank across the ends of its segments."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._meeting: Meeting | None = None

    def wait(self, *, is_ready: Callable[[], bool], windows: int, wants_end: Callable[[], bool]) -> Border | None:
        """Wait until all ranks have arrived; None if the average of this rank is ready before that.

        `windows` is the number of averages that this rank has applied.
        """
        world = self._world
        if self._meeting is None:
            self._meeting = world.arrive("segment ends", what="all ranks to take their last step")
        deadline_s, pause_s = time.monotonic() + world.timeout_s, FIRST_PAUSE_S
        while not world.have_arrived(self._meeting):
            if is_ready():
                return None
            if time.monotonic() > deadline_s:
                world.refuse_absent(self._meeting)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._meeting = None
        told = world.exchange_json([windows, wants_end()], name="averages taken in")
        most = max(taken_in for taken_in, _ in told)
        return Border(is_behind=windows < most, wants_end=any(wants for _, wants in told))
