"""Records the events of one rank: kind, time, duration and reason.

Decides where events are stored: in memory until the run folder is known, then in the rank's own file. The callers
decide which events exist, and `slots` decides how many are kept.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from outrider.timeline import pulses
from outrider.timeline.activity import Activity
from outrider.timeline.bounded_file import LIVE, BoundedFile
from outrider.timeline.slots import Event, EventLimit
from outrider.timeline.timeline_files import LineFile

__all__ = ["CAUSES", "EVENTS", "SCHEMA_VERSION", "Event", "Recorder"]

SCHEMA_VERSION = 1
EVENTS = "events"
"""The folder of the ranks' files in a run folder."""

CAUSES = ("startup", "epoch boundary", "average", "rest", "data", "evaluation")
"""The causes of waits."""


class Recorder:
    """Records the events of one rank, in about two microseconds each; memory and file size are bounded."""

    def __init__(self, rank: int, *, origin_s: float, world_size: int = 1) -> None:
        """`origin_s` is the wall-clock time of the run's start, the same on all ranks."""
        self.rank = rank
        self.world_size = world_size
        self.origin_s = origin_s
        self.events: list[Event] = []
        """Events that are not written to a file yet."""
        self.wait_s = dict.fromkeys(CAUSES, 0.0)
        self.activity = Activity()
        self._last_totals = self.activity.totals()
        self._pulses: BoundedFile | None = None
        self._next_pulse_s = 0.0
        # The monotonic clock orders events; the wall clock only aligns this rank with other ranks.
        self._offset_s = time.time() - origin_s - time.perf_counter()
        self._limit = EventLimit(self._keep, world_size=world_size)
        self._file: LineFile | None = None
        # Reentrant: a signal handler may record an event while one is being recorded.
        self._lock = threading.RLock()

    @property
    def problem(self) -> str | None:
        """The reason why events are no longer written; None while they are."""
        return None if self._file is None else self._file.problem

    def now_s(self) -> float:
        return time.perf_counter() + self._offset_s

    def event(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self._limit.add({"t": round(self.now_s(), 6), "rank": self.rank, "kind": kind, **fields})

    def wait(self, cause: str, seconds: float) -> None:
        """Record a wait that ended now."""
        self.wait_s[cause] += seconds
        if seconds >= 1e-4:
            self.event("wait", cause=cause, ms=round(seconds * 1e3, 3))

    def reset_waits(self) -> None:
        """Reset the waits to zero when a new epoch begins."""
        self.wait_s = dict.fromkeys(CAUSES, 0.0)

    def add_wait(self, cause: str, seconds: float) -> None:
        """Add a short, frequent wait without recording an event, such as the wait in every shared step."""
        self.wait_s[cause] += seconds

    def write_to(self, folder: Path, *, has_pulses: bool = False) -> None:
        """Write the events so far and all later events into the rank's file in a run folder.

        With `has_pulses`, the rank's activity is written to a file for the live page.
        """
        file = LineFile(folder / EVENTS / f"rank{self.rank}.jsonl", what="events", before_write=self._tick)
        with self._lock:
            self._file = file
            file.open(
                {
                    "schema_version": SCHEMA_VERSION,
                    "rank": self.rank,
                    "world_size": self.world_size,
                    "origin_s": self.origin_s,
                },
                self.events,
            )
            self.events = []
        if has_pulses:
            # After the events, one of which names the device: a reader who finds pulses also finds the name.
            self._open_pulses(folder)

    def close(self) -> None:
        """Write all recorded events; later events are dropped."""
        with self._lock:
            self._limit.end()
        if self._file is not None:
            self._file.close()
        pulses_file, self._pulses = self._pulses, None
        if pulses_file is not None:
            pulses_file.add(self._pulse())
            pulses_file.close()

    def _open_pulses(self, folder: Path) -> None:
        header = {"rank": self.rank, "world_size": self.world_size, "origin_s": self.origin_s}
        file = BoundedFile(folder / LIVE / f"rank{self.rank}.jsonl", join=pulses.joined_lines)
        file.open({"schema_version": pulses.SCHEMA_VERSION, **header})
        self._pulses = file

    def _tick(self) -> None:
        now_s = self.now_s()
        with self._lock:
            self._limit.tick(now_s)
        if self._pulses is not None and now_s >= self._next_pulse_s:
            # A pulse slightly too early is better than a pulse one flush too late.
            self._next_pulse_s = now_s + 0.9 * pulses.PERIOD_S
            self._pulses.add(self._pulse())

    def _pulse(self) -> dict[str, Any]:
        before, self._last_totals = self._last_totals, self.activity.totals()
        return pulses.as_line(pulses.between(before, self._last_totals, end_s=self.now_s()))

    def _keep(self, event: Event) -> None:
        if self._file is None:
            self.events.append(event)
        else:
            self._file.add(event)
