"""Recorded schedules: what counts as schedule, and that replaying asks for the same."""

from __future__ import annotations

import json

from outrider.policy.effects import (
    Average,
    AverageReport,
    AwaitOthers,
    Batch,
    Begin,
    Collect,
    Confer,
    Decision,
    Effect,
    Expect,
    HandOver,
    Lease,
    LeaveOpen,
    Merge,
    Note,
    OpenWindow,
    Poll,
    SharedStep,
    Step,
    Take,
)
from outrider.policy.schedule import ScheduleRecorder, SegmentEnd, common_part, drifts_of, end_of, replay

REPORT = AverageReport(window=0, ranks=())


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


def test_of_a_segment_that_failed_ranks_replay_what_they_have_in_common() -> None:
    ahead = [["step", 0, 4, 0], ["begin", 4, False], ["step", 4, 4, 4], ["collect", 0.5], ["begin", 4, False]]
    behind = [["step", 8, 4, 0], ["begin", 4, False], ["step", 12, 4, 4]]
    assert common_part([ahead, behind], met_before=[5, 5]) == [ahead[:4], behind]
    assert common_part([[], ahead], met_before=[5, 5]) == [[], ahead[:1]]


def test_a_rank_may_have_begun_an_average_in_the_epoch_before() -> None:
    ahead = [["collect", 0.5], ["step", 4, 4, 4], ["begin", 4, False], ["step", 20, 4, 4]]
    behind = [["begin", 4, False], ["step", 8, 4, 0], ["collect", 0.5], ["step", 12, 4, 4]]
    assert common_part([ahead, behind], met_before=[6, 5]) == [ahead[:2], behind]


def test_a_window_that_stays_open_is_part_of_the_schedule() -> None:
    window = OpenWindow(samples=4, unaccounted=9)
    assert recorded((AwaitOthers(), None), (LeaveOpen(window), None)) == [LeaveOpen()]


def test_the_end_of_a_segment_tells_what_is_left_and_the_digest() -> None:
    recorder = ScheduleRecorder()
    recorder.saw(Step(Batch(0, 4), 0), None)
    assert end_of(recorder.entries) is None
    recorder.ended([Lease(4, 2)], "00ff")
    assert end_of(recorder.entries) == SegmentEnd((Lease(4, 2),), "00ff")
    assert list(replay(recorder.entries)) == [Step(Batch(0, 4), 0)]


def test_drifts_come_in_the_order_of_the_averages() -> None:
    assert drifts_of([["average", 4, 0.25], ["step", 0, 4, 0], ["collect", None], ["collect", 0.5]]) == [0.25, 0.5]
