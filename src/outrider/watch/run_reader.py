"""Reads a run from its folder while it goes on: pulses of its ranks, its devices, decisions and record.

Decides what is kept in memory, which is bounded. Nothing is locked or written: a run does not notice. Called by the
server once a second at most, however many pages are open.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import DataError
from outrider.timeline import pulses as pulse_lines
from outrider.timeline.bounded_file import LIVE
from outrider.timeline.device_conditions import DEVICES, joined_readings
from outrider.timeline.pulses import Pulse, thinned
from outrider.timeline.recorder import EVENTS
from outrider.timeline.timeline_files import EPOCHS, RECORD, read_record
from outrider.watch.followed_file import FollowedFile

MAX_PULSES = 900
NEWEST_PULSES = 240
"""Two minutes in full detail; the verdict compares with five minutes."""
MAX_NOTES = 60
ENDED = ("finished", "stopped", "interrupted", "failed", "closed")
"""The states of a record that will not change any more."""

_RANK_FILE = re.compile(r"rank(\d+)\.jsonl")
NOTED = frozenset(
    {
        "policy",
        "alone",
        "guard",
        "anchor",
        "split",
        "checkpoint",
        "checkpoint failed",
        "resume",
        "epoch end",
        "compensation",
        "transport",
    }
)
"""Kinds of events that the page lists."""
DECISIONS = frozenset({"policy", "plan", "split", "alone"})
"""Kinds of events that tell how the run goes on."""

Event = dict[str, Any]


class RunReader:
    """One run; `refresh()` reads what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.origin_s: float | None = None
        """Wall-clock time of the start; None as long as no rank has written anything."""
        self.pulses: dict[int, list[Pulse]] = {}
        self.samples = 0
        """Of all ranks, since the start."""
        self.charts: tuple[tuple[float, ...], dict[str, Any]] | None = None
        """The columns of the charts, and what they were made of; kept by the view, because they change rarely."""
        self.readings: list[dict[str, Any]] = []
        self.devices: dict[int, str] = {}
        self.gpus: dict[int, str | None] = {}
        self.notes: deque[Event] = deque(maxlen=MAX_NOTES)
        self._last: dict[str, Event] = {}
        """The newest event of rank 0 of each kind that tells how the run goes on."""
        self._world_size = 0
        self.drift: float | None = None
        self.average_bytes: int | None = None
        self.record: dict[str, Any] = {}
        self.is_there = True
        self._live: dict[int, FollowedFile] = {}
        self._events: dict[int, FollowedFile] = {}
        self._device_file = FollowedFile(folder / LIVE / DEVICES)
        self._record_seen: tuple[int, ...] = ()

    @property
    def status(self) -> str:
        return str(self.record.get("status") or "running")

    @property
    def is_over(self) -> bool:
        return self.status in ENDED

    def now_s(self) -> float:
        """Seconds since the start of the run; of a run that has ended, its last moment."""
        ends = [known[-1].end_s for known in self.pulses.values() if known]
        if self.is_over or self.origin_s is None:
            return max(ends, default=0.0)
        return time.time() - self.origin_s

    @property
    def num_unseen(self) -> int:
        """Ranks that have written nothing into this folder: those of other hosts."""
        return max(0, self._world_size - len(self.pulses)) if self.pulses else 0

    def last(self, *kinds: str) -> Event | None:
        """The newest of the decisions of these kinds, of those that still hold."""
        known = [self._last[kind] for kind in kinds if kind in self._last]
        return max(known, key=lambda event: event.get("t") or 0.0, default=None)

    def refresh(self) -> None:
        """Read what was written since the last call."""
        self.is_there = self.folder.is_dir()
        if not self.is_there:
            return
        self._read_record()
        self._read_pulses()
        self._read_devices()
        self._read_events()

    def _read_record(self) -> None:
        seen = tuple(stamp for name in (RECORD, EPOCHS) for stamp in _stamp(self.folder / name))
        if seen == self._record_seen:
            return
        self._record_seen = seen
        try:
            self.record = read_record(self.folder) or self._from_config()
        except DataError:
            # It is being replaced, or damaged: the last one that could be read stays.
            self._record_seen = ()

    def _from_config(self) -> dict[str, Any]:
        """Before the first record there is the configuration."""
        try:
            config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(config, dict):
            return {}
        options = config.get("options") or {}
        return {"policy": options.get("policy"), "options": options, "devices": config.get("devices")}

    def _read_pulses(self) -> None:
        for rank, path in _rank_files(self.folder / LIVE):
            file = self._live.setdefault(rank, FollowedFile(path))
            lines = file.new_lines()
            if file.was_replaced:
                self.samples -= sum(pulse.samples for pulse in self.pulses.pop(rank, []))
            origin_s = (file.header or {}).get("origin_s")
            if not isinstance(origin_s, int | float):
                continue
            self._meet_origin(float(origin_s))
            self._world_size = (file.header or {}).get("world_size") or 0
            if origin_s == self.origin_s:
                self._keep(rank, [pulse for line in lines if (pulse := pulse_lines.parse(line)) is not None])

    def _meet_origin(self, origin_s: float) -> None:
        """Another start of the same run: what the ranks of before wrote is over."""
        if self.origin_s is None or origin_s > self.origin_s:
            self.origin_s = origin_s
            self.pulses, self.samples = {}, 0
            self.devices, self.gpus, self._last = {}, {}, {}
            self.notes.clear()
            self.drift = self.average_bytes = None

    def _keep(self, rank: int, new: list[Pulse]) -> None:
        known = self.pulses.setdefault(rank, [])
        known += new
        self.samples += sum(pulse.samples for pulse in new)
        while len(known) > MAX_PULSES:
            known[:] = thinned(known, newest=NEWEST_PULSES, join=pulse_lines.joined)

    def _read_devices(self) -> None:
        lines = self._device_file.new_lines()
        if self._device_file.was_replaced:
            self.readings = []
        self.readings += [line for line in lines if _is_reading(line)]
        while len(self.readings) > MAX_PULSES:
            self.readings = thinned(self.readings, newest=NEWEST_PULSES, join=joined_readings)

    def _read_events(self) -> None:
        for rank, path in _rank_files(self.folder / EVENTS):
            file = self._events.setdefault(rank, FollowedFile(path))
            lines = file.new_lines()
            # Files of an earlier start lie beside those of this one until the ranks begin.
            if file.header is not None and file.header.get("origin_s") == self.origin_s:
                for event in lines:
                    self._saw(rank, event)

    def _saw(self, rank: int, event: Event) -> None:
        kind = event.get("kind")
        if kind == "ready":
            self.devices[rank] = str(event.get("device"))
            self.gpus[rank] = event.get("gpu")
        elif rank == 0 and kind == "average end":
            self.drift = event.get("drift")
        elif rank == 0 and kind in DECISIONS:
            if kind == "policy":
                # Local steps have windows, and exact steps have splits: what was planned before is over.
                self._last.clear()
            self._last[kind] = event
        if kind == "transport" and isinstance(event.get("bytes"), int):
            self.average_bytes = event["bytes"]
        if kind in NOTED and (rank == 0 or kind == "checkpoint failed"):
            self.notes.append(event)

    def condition(self, rank: int) -> Mapping[str, Any]:
        """The newest reading of a rank's device; empty where nothing is known."""
        return self.condition_in(self.readings[-1], rank) if self.readings else {}

    def condition_in(self, reading: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
        devices = reading["devices"]
        return devices.get(f"rank {rank}") or devices.get(str(self.gpus.get(rank))) or {}


def _is_reading(line: Mapping[str, Any]) -> bool:
    devices = line.get("devices")
    is_time = isinstance(line.get("t"), int | float)
    return is_time and isinstance(devices, dict) and all(isinstance(one, dict) for one in devices.values())


def _rank_files(folder: Path) -> list[tuple[int, Path]]:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return []
    return [(int(match[1]), folder / name) for name in names if (match := _RANK_FILE.fullmatch(name))]


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return (0,)
    return (status.st_mtime_ns, status.st_size)
