"""One rank's timeline: what happened, when, for how long and why.

Decides only how events are kept; drivers decide what is worth an event. Merging and writing are at the end of a run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

SCHEMA_VERSION = 1

Event = dict[str, Any]
"""`t` seconds since the start of the run, `rank`, `kind`, and what belongs to the kind."""

CAUSES = ("startup", "epoch boundary", "average", "rest", "data", "evaluation")
"""Why a rank waited."""


class Recorder:
    """Keeps the events of one rank in memory; appending one costs about a microsecond."""

    def __init__(self, rank: int, *, origin_s: float) -> None:
        """`origin_s` is the wall-clock time of the run's start, the same on all ranks."""
        self.rank = rank
        self.events: list[Event] = []
        # The monotonic clock orders events; the wall clock only places this rank beside the others.
        self._offset_s = time.time() - origin_s - time.perf_counter()
        self.wait_s = dict.fromkeys(CAUSES, 0.0)

    def now_s(self) -> float:
        return time.perf_counter() + self._offset_s

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"t": round(self.now_s(), 6), "rank": self.rank, "kind": kind, **fields})

    def wait(self, cause: str, seconds: float) -> None:
        """A wait that ended now."""
        self.wait_s[cause] += seconds
        if seconds >= 1e-4:
            self.event("wait", cause=cause, ms=round(seconds * 1e3, 3))

    def add_wait(self, cause: str, seconds: float) -> None:
        """A wait too short and frequent for an event of its own, such as one in every shared step."""
        self.wait_s[cause] += seconds


def merged(timelines: Iterable[Iterable[Event]]) -> dict[str, Any]:
    """All ranks' events in the order of time, as `timeline.json` has them."""
    events = [event for timeline in timelines for event in timeline]
    in_order = sorted(events, key=lambda event: (event["t"], event["rank"]))
    # The starter samples utilization and adds it; ranks that others started are not sampled.
    return {"schema_version": SCHEMA_VERSION, "utilization": None, "events": in_order}
