"""Records the sequence of effects, the schedule, so that another driver can replay it.

Decides what belongs to a schedule: steps, averages with their drift, and when each was applied; but not empty polls,
notes and leases, because steps contain their positions. Used to compare real training with the lab, and to replay it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.policy.effects import (
    Average,
    AverageReport,
    AwaitOthers,
    Batch,
    Begin,
    Collect,
    Confer,
    Effect,
    EndSegment,
    Expect,
    GiveBack,
    HandOver,
    Lease,
    LeaveOpen,
    Merge,
    Note,
    Policy,
    Poll,
    Rest,
    SharedStep,
    Step,
    Take,
)

Entry = list[Any]
"""JSON-able: the effect's name, then its numbers."""


class ScheduleRecorder:
    """Records one rank's schedule of one segment; keeps it in `entries` if no `keep` function is given."""

    def __init__(self, keep: Callable[[Entry], None] | None = None) -> None:
        self.entries: list[Entry] = []
        self._keep = keep or self.entries.append

    def saw(self, effect: Effect, result: object) -> None:
        entry = _entry(effect, result)
        if entry is not None:
            self._keep(entry)

    def failed(self, effect: Effect) -> None:
        """Record an average that raised an error, so that a replay raises it too."""
        match effect:
            case Average() | Begin():
                self.saw(effect, None)
            case Poll() | Collect():
                self._keep(["collect", None])

    def ended(self, left: Sequence[Lease], digest: str | None) -> None:
        """Record the end of the segment: its unused ranges, and the digest of this rank's model."""
        self._keep(["ended", [[lease.start, lease.count] for lease in left], digest])


def replay(entries: Sequence[Entry]) -> Policy:
    """A policy that repeats the recorded effects."""
    for entry in entries:
        if entry[0] != "ended":
            yield _effect(entry)


_MEETINGS = frozenset({"shared", "average", "confer", "hand over", "merge", "begin", "end segment"})


def num_meetings(entries: Sequence[Entry]) -> int:
    """How often this rank met the other ranks."""
    return sum(entry[0] in _MEETINGS for entry in entries)


def common_part(ranks: Sequence[Sequence[Entry]], *, met_before: Sequence[int]) -> list[list[Entry]]:
    """The part of a failed segment that each rank did up to the first meeting that some rank did not reach.

    `met_before` is how often each rank had met the others before this segment. One rank may have begun an average in an
    epoch that was left open, and another only in the next epoch.
    """
    common = min(before + num_meetings(entries) for before, entries in zip(met_before, ranks, strict=True))
    parts: list[list[Entry]] = []
    for met, entries in zip(met_before, ranks, strict=True):
        part: list[Entry] = []
        for entry in entries:
            met += entry[0] in _MEETINGS
            if met > common:
                break
            part.append(entry)
        parts.append(part)
    return parts


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """How a segment ended on one rank; the digest is None if another rank was ahead of it or windows stay open."""

    left: tuple[Lease, ...]
    digest: str | None


def end_of(entries: Sequence[Entry]) -> SegmentEnd | None:
    """How a recorded segment ended; None if the recording ends within it."""
    match entries[-1] if entries else None:
        case ["ended", left, digest]:
            return SegmentEnd(tuple(Lease(start, count) for start, count in left), digest)
    return None


def drifts_of(entries: Sequence[Entry]) -> list[float]:
    """The drift of each average that this rank applied, in order."""
    return [entry[-1] for entry in entries if entry[0] in ("average", "collect") and entry[-1] is not None]


def _entry(effect: Effect, result: object) -> Entry | None:
    match effect:
        case Step(batch, at):
            return ["step", batch.start, batch.count, at]
        case SharedStep(batch, at):
            return ["shared", batch.start, batch.count, at]
        case Average(samples):
            return ["average", samples, _drift(result)]
        case Confer(source, samples):
            return ["confer", source, samples]
        case HandOver(source, samples, at, _):
            return ["hand over", source, samples, at]
        case Merge(samples):
            return ["merge", samples]
        case Begin(samples, is_dry):
            return ["begin", samples, is_dry]
        case EndSegment():
            assert isinstance(result, tuple)
            return ["end segment", [[lease.start, lease.count] for lease in result]]
        case Poll() | Collect():
            return ["collect", _drift(result)] if result is not None else None
        case LeaveOpen():
            return ["leave open"]
        case Take() | GiveBack() | Expect() | Rest() | AwaitOthers() | Note():
            return None


def _drift(result: object) -> float | None:
    if not isinstance(result, AverageReport) or result.drift is None or not math.isfinite(result.drift):
        return None
    return result.drift


def _effect(entry: Entry) -> Effect:
    match entry:
        case ["step", start, count, at]:
            return Step(Batch(start, count), at)
        case ["shared", start, count, at]:
            return SharedStep(Batch(start, count), at)
        case ["average", samples, _]:
            return Average(samples)
        case ["confer", source, samples]:
            return Confer(source, samples)
        case ["hand over", source, samples, at]:
            return HandOver(source, samples, at)
        case ["merge", samples]:
            return Merge(samples)
        case ["begin", samples, is_dry]:
            return Begin(samples, is_dry)
        case ["collect", _]:
            return Collect()
        case ["leave open"]:
            return LeaveOpen()
        case ["end segment", left]:
            return EndSegment(tuple(Lease(start, count) for start, count in left))
    raise AssertionError(entry)
