"""The throttle on clocks of its own: no test here takes real time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.rank.throttle import Throttle


class FakeMachine:
    """A machine whose clocks move only by compute and sleep; its timer oversleeps by a given time."""

    def __init__(self, *, oversleep_s: float = 0.0) -> None:
        self.cpu_s = 0.0
        self.wall_s = 0.0
        self.num_sleeps = 0
        self.oversleep_s = oversleep_s

    def throttle(self, speed: float) -> Throttle:
        return Throttle(speed, cpu_clock=lambda: self.cpu_s, wall_clock=lambda: self.wall_s, sleep=self.sleep)

    def sleep(self, duration_s: float) -> None:
        self.num_sleeps += 1
        self.wall_s += duration_s + self.oversleep_s

    def compute(self, throttle: Throttle, *step_s: float) -> None:
        for duration_s in step_s:
            with throttle:
                self.cpu_s += duration_s
                self.wall_s += duration_s


def fail_in(throttle: Throttle, machine: FakeMachine) -> None:
    with throttle:
        machine.cpu_s += 1.0
        raise ValueError("boom")


def test_a_device_at_40_percent_sleeps_one_and_a_half_times_its_compute() -> None:
    machine = FakeMachine()
    throttle = machine.throttle(0.4)
    machine.compute(throttle, 2.0)
    assert throttle.slept_s == pytest.approx(3.0)


def test_full_speed_never_sleeps() -> None:
    machine = FakeMachine()
    throttle = machine.throttle(1.0)
    machine.compute(throttle, 5.0)
    assert (machine.num_sleeps, throttle.slept_s) == (0, 0.0)


def test_time_that_others_took_from_the_processor_is_not_slept_for() -> None:
    machine = FakeMachine()
    throttle = machine.throttle(0.5)
    with throttle:
        machine.cpu_s += 1.0
        machine.wall_s += 10.0
    assert throttle.slept_s == pytest.approx(1.0)


def test_steps_too_short_to_sleep_for_are_added_up() -> None:
    machine = FakeMachine()
    throttle = machine.throttle(0.5)
    machine.compute(throttle, *[0.0001] * 1000)
    assert throttle.slept_s == pytest.approx(0.1, abs=0.001)
    assert machine.num_sleeps < 110


def test_what_the_system_overslept_is_taken_off_the_next_sleeps() -> None:
    machine = FakeMachine(oversleep_s=0.0015)
    throttle = machine.throttle(0.5)
    machine.compute(throttle, *[0.002] * 500)
    assert throttle.slept_s == pytest.approx(1.0, abs=0.003)


def test_a_step_that_fails_is_not_slept_for() -> None:
    machine = FakeMachine()
    throttle = machine.throttle(0.5)
    with pytest.raises(ValueError, match="boom"):
        fail_in(throttle, machine)
    assert throttle.slept_s == 0.0


@given(
    speed=st.floats(0.05, 0.99),
    steps=st.lists(st.floats(0.0, 0.05), max_size=50),
    oversleep_s=st.floats(0.0, 0.005),
)
def test_the_sleep_owed_and_the_sleep_taken_stay_within_one_timer_error(
    speed: float, steps: list[float], oversleep_s: float
) -> None:
    machine = FakeMachine(oversleep_s=oversleep_s)
    throttle = machine.throttle(speed)
    machine.compute(throttle, *steps)
    owed_s = sum(steps) * (1 / speed - 1)
    assert -0.001 - 1e-9 <= throttle.slept_s - owed_s <= oversleep_s + 1e-9
