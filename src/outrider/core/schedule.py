"""The sequence of effects is the schedule: recorded, it can be replayed by another driver.

Decides what of a run is schedule (steps, averages, when each was taken in) and what is not (polls that found nothing,
notes, leases, since steps carry their positions). Used to hold the runtime against the lab.
"""

from __future__ import annotations

from typing import Any

from outrider.core.effects import (
    Average,
    Batch,
    Begin,
    Collect,
    Confer,
    Effect,
    Expect,
    HandOver,
    Merge,
    Note,
    Policy,
    Poll,
    SharedStep,
    Step,
    Take,
)

Entry = list[Any]
"""JSON-able: the effect's name, then its numbers."""


class ScheduleRecorder:
    """Keeps one rank's schedule of one segment."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def saw(self, effect: Effect, result: object) -> None:
        entry = _entry(effect, result)
        if entry is not None:
            self.entries.append(entry)


def replay(entries: list[Entry]) -> Policy:
    """A policy that does again what was recorded."""
    for entry in entries:
        yield _effect(entry)


def _entry(effect: Effect, result: object) -> Entry | None:
    match effect:
        case Step(batch, at):
            return ["step", batch.start, batch.count, at]
        case SharedStep(batch, at):
            return ["shared", batch.start, batch.count, at]
        case Average(samples):
            return ["average", samples]
        case Confer(source, samples):
            return ["confer", source, samples]
        case HandOver(source, samples, at):
            return ["hand over", source, samples, at]
        case Merge(samples):
            return ["merge", samples]
        case Begin(samples, is_dry):
            return ["begin", samples, is_dry]
        case Poll() | Collect():
            return ["collect"] if result is not None else None
        case Take() | Expect() | Note():
            return None


def _effect(entry: Entry) -> Effect:
    match entry:
        case ["step", start, count, at]:
            return Step(Batch(start, count), at)
        case ["shared", start, count, at]:
            return SharedStep(Batch(start, count), at)
        case ["average", samples]:
            return Average(samples)
        case ["confer", source, samples]:
            return Confer(source, samples)
        case ["hand over", source, samples, at]:
            return HandOver(source, samples, at)
        case ["merge", samples]:
            return Merge(samples)
        case ["begin", samples, is_dry]:
            return Begin(samples, is_dry)
        case ["collect"]:
            return Collect()
    raise AssertionError(entry)
