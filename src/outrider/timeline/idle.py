"""Idle time of devices and its causes: gaps in the sampled utilization, and the waits that ranks recorded.

Decides what counts as a gap and which cause it gets; gaps and recorded waits are measured independently.
Called by the summary, the exporters and the end of a run.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.timeline.recorder import CAUSES
from outrider.timeline.spans import AVERAGE, COMPUTE, WAIT, Event, Span, boundaries

IDLE_PERCENT = 5.0
IDLE_S = 0.5
UNEXPLAINED = "unexplained"
ALL_CAUSES = (*CAUSES, UNEXPLAINED)
# A gap gets a cause if recorded events cover at least this fraction of it.
_EXPLAINED = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """A period of half a second or more in which a device's utilization is below 5 %."""

    rank: int
    start_s: float
    end_s: float
    cause: str

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A part of a rank's time, and the fraction of it that was spent on a cause."""

    start_s: float
    end_s: float
    cause: str
    fraction: float = 1.0

    def within(self, start_s: float, end_s: float) -> float:
        return max(0.0, min(self.end_s, end_s) - max(self.start_s, start_s)) * self.fraction


def idle_gaps(utilization: Mapping[str, Any] | None, events: Sequence[Event], found: Sequence[Span]) -> list[Gap]:
    """The gaps of all ranks up to the end of their last epoch, each with its cause; empty without samples.

    `found` are the spans of the events.
    """
    gaps: list[Gap] = []
    for device in (utilization or {}).get("devices", ()):
        mine = [event for event in events if event["rank"] == device["rank"]]
        quiet = list(_quiet((utilization or {})["t"], device["percent"] or (), end_s=_end_s(mine)))
        if quiet:
            parts = _parts(mine, [span for span in found if span.rank == device["rank"]])
            gaps += _with_causes(quiet, parts, device["rank"])
    return gaps


def sampled_s(utilization: Mapping[str, Any] | None, gaps: Iterable[Gap]) -> dict[int, dict[str, float]]:
    """Seconds in gaps by rank and cause, for the ranks that were sampled."""
    devices = (utilization or {}).get("devices", ())
    sums = {one["rank"]: dict.fromkeys(ALL_CAUSES, 0.0) for one in devices if one["percent"] is not None}
    for gap in gaps:
        sums[gap.rank][gap.cause] += gap.seconds
    return sums


def recorded_s(events: Iterable[Event]) -> dict[int, dict[str, float]]:
    """Seconds that each rank waited, by cause, as recorded by the rank; includes short waits."""
    sums: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(CAUSES, 0.0))
    for event in events:
        if event["kind"] == "epoch end":
            for cause, ms in event["waits_ms"].items():
                sums[event["rank"]][cause] += ms / 1e3
    return dict(sums)


def _end_s(mine: Iterable[Event]) -> float:
    return max((event["t"] for event in mine if event["kind"] == "epoch end"), default=0.0)


def _quiet(times_s: Sequence[float], percent: Sequence[float | None], *, end_s: float) -> Iterator[tuple[float, float]]:
    """Yield long enough spans of samples below the threshold; a sample covers the time since the previous sample."""
    start_s: float | None = None
    before_s = 0.0
    # A sample above the threshold at the end closes the last span.
    for t, value in itertools.chain(zip(times_s, percent, strict=False), [(math.inf, 100.0)]):
        is_quiet = value is not None and value < IDLE_PERCENT
        if is_quiet and start_s is None:
            start_s = before_s
        if not is_quiet and start_s is not None:
            if min(before_s, end_s) - start_s >= IDLE_S:
                yield start_s, min(before_s, end_s)
            start_s = None
        before_s = t


def _with_causes(quiet: Iterable[tuple[float, float]], parts: Sequence[_Part], rank: int) -> Iterator[Gap]:
    """Yield gaps with their causes; both inputs are ordered by time, so parts are compared with nearby gaps only."""
    coming = iter(sorted(parts, key=lambda part: part.start_s))
    upcoming = next(coming, None)
    near: list[_Part] = []
    for start_s, end_s in quiet:
        while upcoming is not None and upcoming.start_s < end_s:
            near.append(upcoming)
            upcoming = next(coming, None)
        near = [part for part in near if part.end_s > start_s]
        yield Gap(rank=rank, start_s=start_s, end_s=end_s, cause=_cause(near, start_s, end_s))


def _cause(parts: Iterable[_Part], start_s: float, end_s: float) -> str:
    """The cause that covers most of the gap, if enough of it was recorded."""
    shares: dict[str, float] = defaultdict(float)
    for part in parts:
        shares[part.cause] += part.within(start_s, end_s)
    cause = max(shares, key=lambda name: shares[name], default=UNEXPLAINED)
    is_explained = bool(shares) and sum(shares.values()) >= _EXPLAINED * (end_s - start_s) and shares[cause] > 0
    return cause if is_explained else UNEXPLAINED


def _parts(mine: Sequence[Event], found: Sequence[Span]) -> list[_Part]:
    """The parts of a rank's time in which it did not compute."""
    parts = [_Part(start_s=a, end_s=b, cause="epoch boundary") for a, b in boundaries(mine)]
    parts += [_boundaries_of(event) for event in mine if event["kind"] == "epoch end" and "count" in event]
    first_s = next((event["t"] for event in mine if event["kind"] == "epoch start"), None)
    if first_s is not None:
        parts.append(_Part(start_s=0.0, end_s=first_s, cause="startup"))
    window_starts = [span.start_s for span in found if span.name == "window"]
    for span in found:
        if span.lane != AVERAGE or span.merged_s is not None or _is_blocking(span, window_starts):
            parts.extend(_parts_of(span))
    return parts


def _boundaries_of(merged: Event) -> _Part:
    """Boundaries between epochs that were merged into one event, so that their exact times are not known."""
    start_s, end_s = merged["start"], merged["t"]
    fraction = merged["boundary_ms"] / 1e3 / max(1e-9, end_s - start_s)
    return _Part(start_s=start_s, end_s=end_s, cause="epoch boundary", fraction=fraction)


def _is_blocking(average: Span, window_starts: Sequence[float]) -> bool:
    """Whether no window started during the average; during a background average the rank computes."""
    return bisect_left(window_starts, average.start_s) == bisect_left(window_starts, average.end_s)


def _parts_of(span: Span) -> Iterator[_Part]:
    start_s, end_s = span.start_s, span.end_s
    length_s = end_s - start_s
    # Merged events fill only a part of their span.
    filled = 1.0 if span.merged_s is None else min(1.0, span.merged_s / max(1e-9, length_s))
    # Skip waits that other parts cover: a wait with a window lies in its average, others in the edges of epochs.
    if span.lane == WAIT and "window" not in span.facts and span.name not in ("startup", "epoch boundary"):
        yield _Part(start_s=start_s, end_s=end_s, cause=span.name, fraction=filled)
    elif span.lane == COMPUTE and span.name == "evaluation":
        yield _Part(start_s=start_s, end_s=end_s, cause="evaluation", fraction=filled)
    elif span.lane == COMPUTE and span.name == "window" and length_s > 0:
        for cause, name in (("data", "data_ms"), ("average", "average_ms")):
            fraction = min(1.0, span.facts.get(name, 0.0) / 1e3 / length_s)
            yield _Part(start_s=start_s, end_s=end_s, cause=cause, fraction=fraction)
    elif span.lane == AVERAGE:
        if "blocking_ms" in span.facts:
            filled = min(1.0, span.facts["blocking_ms"] / 1e3 / max(1e-9, length_s))
        yield _Part(start_s=start_s, end_s=end_s, cause="average", fraction=filled)
