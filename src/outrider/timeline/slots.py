"""Bounds the number of a rank's events: after a limit, the events of a time slot become one event per kind.

Decides which events are kept individually, the length of a slot, and how events are merged: counts, times and samples
stay exact. Does no I/O. Called by the recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Event = dict[str, Any]
"""Has `t` (seconds since the start of the run), `rank`, `kind`, and the fields of the kind."""

STEP_KINDS = frozenset({"window", "average start", "average end", "wait", "plan"})
"""Kinds that occur one or more times in every window."""
ONCE_KINDS = frozenset({"joined", "data open", "ready", "transport", "compensation", "resume", "speeds"})
"""Kinds that occur a few times in a run; always kept."""
DETAILED_STEP_EVENTS = 20_000
DETAILED_OTHER_EVENTS = 5_000
SLOT_S = 1.0
SLOTS_PER_RUN = 1_000
"""A slot lasts at least a second, and at least the time since the start of the run divided by this number."""
FULL_DETAIL_RANKS = 4
"""Larger worlds keep fewer events per rank, so that the size of a merged timeline stays about the same."""

_SUMS = ("ms", "batches", "samples", "compute_ms", "average_ms", "data_ms", "throttle_ms", "bytes")
_MAX_OPEN_AVERAGES = 64

Key = tuple[str, str, bool]


class EventLimit:
    """Passes events to `keep`, ordered by time: first individually, later one event per slot and kind."""

    def __init__(self, keep: Callable[[Event], None], *, world_size: int = 1) -> None:
        self._keep = keep
        detail = min(1.0, FULL_DETAIL_RANKS / world_size)
        self._left = {True: round(DETAILED_STEP_EVENTS * detail), False: round(DETAILED_OTHER_EVENTS * detail)}
        self._slots_per_run = SLOTS_PER_RUN * detail
        self._merged: dict[Key, Event] = {}
        self._slot_end_s = 0.0
        self._last_end_s: dict[Key, float] = {}
        self._average_starts: dict[int, float] = {}
        self._open_average: Event | None = None
        """The merged averages, if no window has followed the last of them yet."""
        self._last_average: tuple[float, float] = (0.0, 0.0)
        self._window_start_s = 0.0
        self._epoch_start: Event | None = None
        self._kept_epoch: int | None = None

    def add(self, event: Event) -> None:
        if self._is_kept(event):
            self.end_slot()
            self._keep(event)
            return
        self.tick(event["t"])
        if not self._merged:
            self._slot_end_s = event["t"] + max(SLOT_S, event["t"] / self._slots_per_run)
        _MERGE.get(event["kind"], EventLimit._count)(self, event)

    def _is_kept(self, event: Event) -> bool:
        kind = event["kind"]
        # An epoch whose start was recorded also gets its end recorded.
        if kind in ONCE_KINDS or (kind == "epoch end" and event["epoch"] == self._kept_epoch):
            return True
        is_step = kind in STEP_KINDS
        if self._left[is_step] == 0:
            return False
        self._left[is_step] -= 1
        if kind == "epoch start":
            self._kept_epoch = event["epoch"]
        return True

    def tick(self, now_s: float) -> None:
        """End the slot if its time has passed."""
        if self._merged and now_s >= self._slot_end_s:
            self.end_slot()

    def end_slot(self) -> None:
        """Pass on the merged events of the slot."""
        if not self._merged:
            return
        merged = sorted(self._merged.values(), key=lambda event: float(event["t"]))
        self._last_end_s.update({key: event["t"] for key, event in self._merged.items()})
        self._merged, self._open_average = {}, None
        for event in merged:
            self._keep(_rounded(event))

    def end(self) -> None:
        """Pass on all events at the end of the run, including an unfinished epoch."""
        self.end_slot()
        if self._epoch_start is not None:
            self._keep(self._epoch_start)
            self._epoch_start = None

    # One merge function per kind

    def _count(self, event: Event) -> None:
        """Keep the last event of its kind."""
        key = (event["kind"], "", False)
        before = self._merged.get(key, {"count": 0})
        self._merged[key] = {**event, "count": before["count"] + 1}

    def _sum(self, event: Event, *, start_s: float) -> Event:
        """Add an event to the merged event of its kind and cause, which lasts from the first to the last event."""
        key = (event["kind"], event.get("cause", ""), "window" in event)
        merged = self._merged.get(key)
        if merged is None:
            start_s = max(start_s, self._last_end_s.get(key, 0.0))
            self._merged[key] = merged = {**event, "start": start_s, "count": 1}
            return merged
        merged["t"] = event["t"]
        merged["count"] += 1
        for name in _SUMS:
            if name in event:
                merged[name] = merged.get(name, 0) + event[name]
        if "window" in event:
            merged["window"] = event["window"]
        return merged

    def _lasted(self, event: Event) -> None:
        self._sum(event, start_s=event["t"] - event["ms"] / 1e3)

    def _window(self, event: Event) -> None:
        span_ms = (event["t"] - event["start"]) * 1e3
        merged = self._sum(event, start_s=event["start"])
        merged["span_ms"] = merged.get("span_ms", 0.0) + span_ms
        self._window_start_s = event["start"]
        average, self._open_average = self._open_average, None
        start_s, end_s = self._last_average
        if average is not None and start_s <= event["start"] < end_s:
            average["blocking_ms"] -= (end_s - start_s) * 1e3

    def _average_start(self, event: Event) -> None:
        if len(self._average_starts) >= _MAX_OPEN_AVERAGES:
            self._average_starts.clear()
        self._average_starts[event["window"]] = event["t"]

    def _average_end(self, event: Event) -> None:
        end_s = event["t"]
        start_s = self._average_starts.pop(event["window"], end_s - event["ms"] / 1e3)
        drift = event["drift"]
        merged = self._sum(event, start_s=start_s)
        span_ms = (end_s - start_s) * 1e3
        # If a window started during the average, the rank computed meanwhile.
        is_blocking = self._window_start_s < start_s
        merged["span_ms"] = merged.get("span_ms", 0.0) + span_ms
        merged["blocking_ms"] = merged.get("blocking_ms", 0.0) + (span_ms if is_blocking else 0.0)
        merged["drift"] = max((one for one in (merged["drift"], drift) if one is not None), default=None)
        self._open_average = merged if is_blocking else None
        self._last_average = (start_s, end_s)

    def _epoch_started(self, event: Event) -> None:
        self._epoch_start = event

    def _epoch_ended(self, event: Event) -> None:
        start, self._epoch_start = self._epoch_start, None
        start_s = event["t"] if start is None else start["t"]
        key = ("epoch end", "", False)
        before = self._merged.get(key)
        if before is None:
            waits_ms, boundary_ms = dict(event["waits_ms"]), 0.0
            self._merged[key] = {**event, "start": start_s, "first": event["epoch"], "count": 1}
        else:
            waits_ms = _added(before["waits_ms"], event["waits_ms"])
            boundary_ms = before["boundary_ms"] + (start_s - before["t"]) * 1e3
            kept = {name: before[name] for name in ("start", "first")}
            self._merged[key] = {**event, **kept, "count": before["count"] + 1}
        self._merged[key] |= {"waits_ms": waits_ms, "boundary_ms": boundary_ms}


_MERGE: Mapping[str, Callable[[EventLimit, Event], None]] = {
    "window": EventLimit._window,
    "average start": EventLimit._average_start,
    "average end": EventLimit._average_end,
    "wait": EventLimit._lasted,
    "evaluation": EventLimit._lasted,
    "hand over": EventLimit._lasted,
    "throttle": EventLimit._lasted,
    "epoch start": EventLimit._epoch_started,
    "epoch end": EventLimit._epoch_ended,
}


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}


def _rounded(event: Event) -> Event:
    """Round sums of milliseconds."""
    return {
        name: round(value, 3) if name.endswith("ms") and isinstance(value, float) else value
        for name, value in event.items()
    }
