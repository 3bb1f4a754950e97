"""Converts a run's events to spans of time: rank, lane, name, start and end.

Decides how events are interpreted. Drawing, tables and idle analysis use the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Event = Mapping[str, Any]

COMPUTE, AVERAGE, WAIT = "compute", "average", "wait"
LANES = (COMPUTE, AVERAGE, WAIT)
"""Spans in one lane of a rank do not overlap; an average, in another lane, may run during the next window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A span of time."""

    rank: int
    lane: str
    name: str
    """set-up, window, evaluation, average, hand-over, or the cause of a wait."""
    start_s: float
    end_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    merged_s: float | None = None
    """Total duration of the merged spans; None for a span that was recorded individually."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s if self.merged_s is None else self.merged_s

    @property
    def count(self) -> int:
        """Number of merged spans."""
        return int(self.facts.get("count", 1))


def spans(events: Iterable[Event]) -> list[Span]:
    """All spans of all ranks, by rank, lane and start."""
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_rank[event["rank"]].append(event)
    found = [span for rank in sorted(by_rank) for span in _of_rank(by_rank[rank])]
    return sorted(found, key=lambda span: (span.rank, LANES.index(span.lane), span.start_s))


def _of_rank(events: Sequence[Event]) -> Iterator[Span]:
    average_starts = {event["window"]: event["t"] for event in events if event["kind"] == "average start"}
    for event in events:
        span = _span(event, average_starts)
        if span is not None:
            yield span


def _span(event: Event, average_starts: Mapping[int, float]) -> Span | None:
    if "count" in event:
        return _merged(event)
    match event["kind"]:
        case "ready":
            return _make(event, COMPUTE, "set-up", 0.0)
        case "window":
            return _make(event, COMPUTE, "window", event["start"])
        case "evaluation":
            return _make(event, COMPUTE, "evaluation", event["t"] - event["ms"] / 1e3)
        case "average end":
            return _make(event, AVERAGE, "average", average_starts.get(event["window"], event["t"]))
        case "hand over":
            return _make(event, AVERAGE, "hand-over", event["t"] - event["ms"] / 1e3)
        case "wait":
            return _wait(event, average_starts)
    return None


_MERGED = {
    "window": (COMPUTE, "window"),
    "evaluation": (COMPUTE, "evaluation"),
    "average end": (AVERAGE, "average"),
    "hand over": (AVERAGE, "hand-over"),
}


def _merged(event: Event) -> Span | None:
    """The span of a slot's merged events (see `slots`), from the start of the first to the end of the last."""
    lane, name = (WAIT, event["cause"]) if event["kind"] == "wait" else _MERGED.get(event["kind"], (None, ""))
    if lane is None:
        return None
    span = _make(event, lane, name, event["start"])
    return replace(span, merged_s=event.get("span_ms", event.get("ms", 0.0)) / 1e3)


def _wait(event: Event, average_starts: Mapping[int, float]) -> Span:
    """The span of a wait; waits in a blocking average are reported one window later, but lie at the average's start."""
    seconds = event["ms"] / 1e3
    start_s = average_starts.get(event.get("window", -1), event["t"] - seconds)
    return Span(
        rank=event["rank"],
        lane=WAIT,
        name=event["cause"],
        start_s=start_s,
        end_s=start_s + seconds,
        facts=_facts(event),
    )


def _make(event: Event, lane: str, name: str, start_s: float) -> Span:
    start_s = max(0.0, start_s)
    return Span(
        rank=event["rank"],
        lane=lane,
        name=name,
        start_s=start_s,
        end_s=max(start_s, event["t"]),
        facts=_facts(event),
    )


def _facts(event: Event) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("t", "rank", "kind", "start", "cause")}


def boundaries(mine: Sequence[Event]) -> list[tuple[float, float]]:
    """The times from the end of each epoch of one rank to the start of the next; merged epochs count as one."""
    ends = [event["t"] for event in mine if event["kind"] == "epoch end"]
    starts = [event["t"] for event in mine if event["kind"] == "epoch start"]
    starts += [event["start"] for event in mine if event["kind"] == "epoch end" and "count" in event]
    starts.sort()
    return list(zip(ends, starts[1:], strict=False))
