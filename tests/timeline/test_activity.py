"""How a rank counts its own time while another thread reads it."""

from __future__ import annotations

import threading

import pytest

from outrider.timeline.activity import PHASES, Activity


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_time_goes_to_the_phase_in_which_it_was_spent(clock: Clock) -> None:
    activity = Activity(clock)
    clock.now_s = 2.0
    activity.enter("compute")
    clock.now_s = 5.0
    with activity.during("data"):
        clock.now_s = 6.0
    clock.now_s = 6.5
    totals = activity.totals()
    assert (totals.spent_s["startup"], totals.spent_s["compute"], totals.spent_s["data"]) == (2.0, 3.5, 1.0)
    assert (totals.phase, totals.phase_s) == ("compute", 0.5)


def test_time_between_two_effects_belongs_to_the_later_one(clock: Clock) -> None:
    activity = Activity(clock)
    activity.enter("join")
    clock.now_s = 0.2
    activity.belonged_to("compute")
    clock.now_s = 0.5
    activity.enter("join")
    assert activity.totals().spent_s["compute"] == 0.5
    assert activity.totals().spent_s["join"] == 0.0


def test_a_phase_may_be_entered_later_than_it_began(clock: Clock) -> None:
    activity = Activity(clock)
    activity.enter("compute")
    clock.now_s = 1.0
    assert activity.enter("join", at_s=0.75) == 0.75
    clock.now_s = 1.5
    activity.enter("average")
    totals = activity.totals()
    assert (totals.spent_s["compute"], totals.spent_s["join"]) == (0.75, 0.75)


def test_a_change_that_an_exception_cut_short_stops_neither_reading_nor_counting(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    activity = Activity(clock)
    activity.enter("compute")
    monkeypatch.setattr("outrider.timeline.activity._TRY_AGAIN_S", 0.0)
    spent_s = activity._totals.spent_s
    activity._totals.spent_s = {}
    with pytest.raises(KeyError):
        activity.enter("data")
    activity._totals.spent_s = spent_s
    assert activity.totals().phase == "compute"
    clock.now_s = 2.0
    activity.enter("data")
    clock.now_s = 3.0
    assert activity.totals().spent_s["data"] == 1.0


def test_a_device_tells_afterwards_what_was_an_average(clock: Clock) -> None:
    activity = Activity(clock)
    activity.enter("compute")
    clock.now_s = 1.0
    activity.enter("join")
    activity.move("compute", "average", 0.25)
    assert activity.totals().spent_s["average"] == 0.25
    assert activity.totals().spent_s["compute"] == 0.75


def test_losses_that_are_not_finite_are_left_out() -> None:
    activity = Activity()
    activity.saw_loss(float("nan"), 8)
    activity.saw_loss(3.0, 0)
    activity.saw_loss(4.0, 8)
    assert (activity.totals().loss_sum, activity.totals().loss_samples) == (4.0, 8)


def test_another_thread_never_sees_half_a_change() -> None:
    """Every reading is the time since the start, however it falls into a change."""
    activity = Activity()
    is_over = threading.Event()

    def change() -> None:
        while not is_over.is_set():
            for phase in PHASES:
                activity.enter(phase)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        sums = [sum(activity.totals().spent_s.values()) for _ in range(20_000)]
    finally:
        is_over.set()
        thread.join()
    assert sums == sorted(sums)
