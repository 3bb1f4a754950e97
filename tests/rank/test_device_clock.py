"""Clocks of a CUDA device, told by events that pass when the test says so."""

from __future__ import annotations

import pytest
import torch

from outrider.rank.device_clock import DeviceClock, DeviceClocks, SharedClock, steps_ahead
from outrider.rank.meter import Meter
from outrider.rank.throttle import Throttle
from outrider.timeline.recorder import Recorder


class Device:
    """Time passes on it by `run`; an event takes the time at which it was queued."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def run(self, ms: float) -> None:
        self.now_ms += ms


class Event:
    device: Device

    def __init__(self, **_: bool) -> None:
        self.at_ms = 0.0

    def record(self, stream: object) -> None:
        self.at_ms = self.device.now_ms

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    Event.device = Device()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return Event.device


def step(clock: DeviceClock, device: Device, ms: float, *, is_steady: bool = True) -> None:
    device.run(ms)
    clock.stepped(is_steady=is_steady)


def test_steps_and_gaps_are_told_apart(device: Device) -> None:
    clock = DeviceClock(torch.device("cuda"))
    step(clock, device, 3.0)
    with clock.gap():
        device.run(1.0)
    step(clock, device, 5.0)
    measured = clock.measure(2)
    assert (measured.compute_s, measured.exposed_s, measured.setup_s) == pytest.approx((8e-3, 1e-3, 0.0))


def test_a_step_that_warms_something_up_counts_as_a_usual_one(device: Device) -> None:
    clock = DeviceClock(torch.device("cuda"))
    step(clock, device, 3.0)
    step(clock, device, 60.0, is_steady=False)
    step(clock, device, 3.0)
    measured = clock.measure(3)
    assert (measured.compute_s, measured.setup_s) == pytest.approx((9e-3, 60e-3))
    assert clock.measure(0).setup_s == 0.0


def test_a_window_of_nothing_but_warm_up_tells_no_pace(device: Device) -> None:
    clock = DeviceClock(torch.device("cuda"))
    step(clock, device, 60.0, is_steady=False)
    assert clock.measure(1).compute_s == 0.0
    step(clock, device, 3.0)
    assert clock.measure(1).compute_s == pytest.approx(3e-3)
    step(clock, device, 60.0, is_steady=False)
    assert clock.measure(1).compute_s == pytest.approx(3e-3)


def shared_step(clock: SharedClock, device: Device) -> float:
    for ms in (0.0, 2.0, 0.5, 0.25):
        device.run(ms)
        clock.mark()
    measured = clock.measured()
    assert measured.compute_s == pytest.approx(2.25e-3)
    return measured.exposed_s * 1e3


def test_what_lies_between_two_shared_steps_is_exposed(device: Device) -> None:
    clock = SharedClock(torch.device("cuda"))
    assert shared_step(clock, device) == pytest.approx(0.5)
    for _ in range(3):
        device.run(0.4)
        assert shared_step(clock, device) == pytest.approx(0.9)


def test_what_came_before_a_restart_is_not(device: Device) -> None:
    clock = SharedClock(torch.device("cuda"))
    shared_step(clock, device)
    device.run(100.0)
    clock.restart()
    assert shared_step(clock, device) == pytest.approx(0.5)


def test_steps_beside_an_average_tell_what_it_took_from_them(device: Device) -> None:
    clock = DeviceClock(torch.device("cuda"))
    for _ in range(3):
        step(clock, device, 4.0)
    assert clock.measure(3).slowed_s == 0.0
    clock.average_began()
    for _ in range(5):
        step(clock, device, 7.0)
    clock.average_ended()
    for _ in range(2):
        step(clock, device, 5.0)
    measured = clock.measure(7)
    assert measured.compute_s == pytest.approx(45e-3)
    assert measured.slowed_s == pytest.approx(5 * 2e-3)


def test_where_an_average_is_always_beside_the_last_steps_without_one_are_the_measure(device: Device) -> None:
    clock = DeviceClock(torch.device("cuda"))
    clock.average_began()
    step(clock, device, 9.0)
    assert clock.measure(1).slowed_s == 0.0, "no step without one is known"
    clock.average_ended()
    for _ in range(2):
        step(clock, device, 4.0)
    clock.measure(2)
    clock.average_began()
    for _ in range(2):
        step(clock, device, 6.0)
    # One step after it may have begun beside it, and a step that warms something up tells nothing.
    clock.average_ended()
    step(clock, device, 6.0)
    step(clock, device, 60.0, is_steady=False)
    assert clock.measure(4).slowed_s == pytest.approx(4e-3)


@pytest.mark.parametrize(
    ("pace_s", "steps"), [(None, 2), (1e-5, 64), (1e-3, 4), (3e-3, 2), (19e-3, 2), (20e-3, 1), (1.0, 1)]
)
def test_the_host_keeps_more_short_steps_queued_than_long_ones(pace_s: float | None, steps: int) -> None:
    assert steps_ahead(pace_s) == steps


def test_a_pause_between_two_epochs_belongs_to_no_step(device: Device) -> None:
    clock = DeviceClock(torch.device("cuda"))
    for _ in range(2):
        device.run(10.0)
        clock.stepped()
    device.run(500.0)
    clock.skip_pause()
    device.run(10.0)
    clock.stepped()
    measured = clock.measure(3)
    assert measured.compute_s == pytest.approx(0.030)
    assert measured.exposed_s == 0.0


def test_an_idle_device_at_the_end_of_an_epoch_is_no_compute(device: Device) -> None:
    """A rank that is done waits for the others with steps that no average has accounted for yet."""
    clocks = DeviceClocks(torch.device("cuda"))
    meter = Meter(rank=0, throttle=Throttle(1.0), recorder=Recorder(0, origin_s=0.0), clocks=clocks)
    for _ in range(4):
        device.run(3.0)
        meter.queued_step(is_steady=True)
        meter.ended_step(8, 3e-3)
    device.run(500.0)
    meter.waited_for_others(0.5)
    with meter.gap():
        device.run(1.0)
    meter.end_window(0)
    facts = meter.facts(loss=(0.0, 0), is_dry=False, wants_stop=False, wants_pause=False)
    assert facts[2:4] == pytest.approx([12.0, 1.0])
