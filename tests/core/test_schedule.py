"""Recorded schedules: what counts as schedule, and that replaying asks for the same."""

from __future__ import annotations

import json

from outrider.core.effects import (
    Average,
    Batch,
    Begin,
    Collect,
    Confer,
    Decision,
    Effect,
    Expect,
    HandOver,
    Lease,
    Merge,
    Note,
    Poll,
    Report,
    SharedStep,
    Step,
    Take,
)
from outrider.core.schedule import ScheduleRecorder, replay

REPORT = Report(window=0, ranks=())


def recorded(*seen: tuple[Effect, object]) -> list[Effect]:
    recorder = ScheduleRecorder()
    for effect, result in seen:
        recorder.saw(effect, result)
    return list(replay(json.loads(json.dumps(recorder.entries))))


def test_steps_and_averages_come_back_as_they_were() -> None:
    effects = [
        Step(Batch(3, 4), at=7),
        Average(samples=4),
        SharedStep(Batch(7, 0), at=9),
        Confer(source=1, samples=4),
        HandOver(source=1, samples=4, at=12),
        Merge(samples=11),
        Begin(samples=4, is_dry=True),
        Collect(),
    ]
    assert recorded(*[(effect, REPORT) for effect in effects]) == effects


def test_a_poll_that_found_an_average_is_replayed_as_waiting_for_it() -> None:
    assert recorded((Poll(), REPORT)) == [Collect()]


def test_what_moved_nothing_is_not_schedule() -> None:
    note = Note(Decision("plan", 1, "because"))
    assert recorded((Poll(), None), (Take(8, share=0.5), Lease(0, 8)), (Expect(()), None), (note, None)) == []
