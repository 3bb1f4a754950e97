"""Measures steps and averages with events on a CUDA device.

Decides how far the host may run ahead of the device; no window waits for the device just to be measured. Called by the
meter; other devices are measured by the host's clock.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

AHEAD_S = 4e-3
"""Work that the host keeps queued: enough to bridge its own pauses, little enough to notice averages soon."""
MIN_AHEAD, MAX_AHEAD = 2, 64
LONG_STEP_S = 0.02
"""Queue only one step if steps take this long: averages are applied sooner, and ranks end an epoch closer together."""
# The first step after an average may have overlapped with it.
MIN_APART = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTimes:
    """Seconds of compute, of exposed time and of warm-up since the previous reading."""

    compute_s: float
    exposed_s: float
    setup_s: float = 0.0
    slowed_s: float = 0.0
    """The part of compute by which steps took longer beside an average than without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """An event, and what lies between it and the previous one: steps, a gap, or a warm-up step."""

    event: torch.cuda.Event
    steps: int = 0
    is_gap: bool = False
    is_setup: bool = False
    is_beside: bool = False
    """Whether an average ran in the background."""


def steps_ahead(pace_s: float | None) -> int:
    """How many steps the host keeps queued, given the time of one; None if that is not known yet."""
    if not pace_s:
        return MIN_AHEAD
    if pace_s >= LONG_STEP_S:
        return 1
    return min(MAX_AHEAD, max(MIN_AHEAD, math.ceil(AHEAD_S / pace_s)))


class DeviceClock:
    """Events on the compute stream: between two of them lies a step or a gap.

    It measures the steps that are done when asked, and assumes that the few still queued take as long. A gap costs only
    the time that the device lost: nothing if it had work queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pace_s: float | None = None
        self._apart_pace_s: float | None = None
        """Time of a step without an average beside it."""
        self._has_average_beside = False
        self.restart()

    def average_began(self) -> None:
        """Note that an average started in the background: steps from now on run beside it."""
        self._has_average_beside = True

    def average_ended(self) -> None:
        self._has_average_beside = False

    def restart(self) -> None:
        """Start the time now; what came before, such as an evaluation, counts for nothing."""
        self._marks: deque[_Mark] = deque()
        self._queued: deque[torch.cuda.Event] = deque()
        self._last = self._record()
        self._reset()

    def skip_pause(self) -> None:
        """Leave out a pause before the next step, in which all queued work finished."""
        self._read_done()
        self._last = self._record()

    def _reset(self) -> None:
        self._steps = self._beside_steps = 0
        self._compute_s = self._exposed_s = self._setup_s = self._beside_s = 0.0

    def stepped(self, *, is_steady: bool = True) -> None:
        """Record a queued step; returns when there is room for the next. Only steady steps tell the speed."""
        mark = _Mark(
            event=self._record(),
            steps=int(is_steady),
            is_setup=not is_steady,
            is_beside=is_steady and self._has_average_beside,
        )
        self._marks.append(mark)
        self._queued.append(mark.event)
        while len(self._queued) > steps_ahead(self._pace_s):
            self._queued.popleft().synchronize()
        self._read_done()

    @contextlib.contextmanager
    def gap(self) -> Iterator[None]:
        """Context manager around work that is no step: leases, snapshots, applying averages."""
        self._marks.append(_Mark(event=self._record()))
        yield
        self._marks.append(_Mark(event=self._record(), is_gap=True))

    def measure(self, batches: int) -> MeasuredTimes:
        """Time of `batches` steps at the pace of steady ones, and gaps; waits only if no step has ever finished."""
        self._read_done()
        if self._steps == 0 and self._pace_s is None and self._marks:
            self._marks[-1].event.synchronize()
            self._read_done()
        if self._steps:
            self._pace_s = self._compute_s / self._steps
        measured = MeasuredTimes(
            compute_s=batches * (self._pace_s or 0.0),
            exposed_s=self._exposed_s,
            setup_s=self._setup_s,
            slowed_s=self._slowed_s(),
        )
        self._reset()
        return measured

    def _slowed_s(self) -> float:
        """Time that a background average cost the steps beside it, as its kernels and copies share the device."""
        apart = self._steps - self._beside_steps
        if apart >= MIN_APART:
            self._apart_pace_s = (self._compute_s - self._beside_s) / apart
        if self._apart_pace_s is None:
            return 0.0
        return max(0.0, self._beside_s - self._beside_steps * self._apart_pace_s)

    def _record(self) -> torch.cuda.Event:
        # Blocking: a host that waits for the device sleeps instead of spinning on a core that averages need.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _read_done(self) -> None:
        while self._marks and self._marks[0].event.query():
            mark = self._marks.popleft()
            seconds = self._last.elapsed_time(mark.event) / 1e3
            self._last = mark.event
            self._steps += mark.steps
            if mark.is_gap:
                self._exposed_s += seconds
            elif mark.is_setup:
                self._setup_s += seconds
            else:
                self._compute_s += seconds
                self._beside_s += seconds * mark.is_beside
                self._beside_steps += mark.is_beside


class SharedClock:
    """Four events of one shared step: its start, its gradient, the average, the update.

    Time between two steps is the cost of waiting for the first one, and counts as exposed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = self._four_events()
        self._before: list[torch.cuda.Event] | None = None
        self._num_marks = 0

    def restart(self) -> None:
        """Note that the next step does not follow a shared step."""
        self._before = None

    def mark(self) -> None:
        """Record the next of the four events."""
        self._events[self._num_marks].record(torch.cuda.current_stream(self._device))
        self._num_marks += 1

    def measured(self) -> MeasuredTimes:
        """Wait for the last event; returns the times of the step and resets the clock."""
        start, gradient, average, update = self._events
        update.synchronize()
        self._num_marks = 0
        compute_ms = start.elapsed_time(gradient) + average.elapsed_time(update)
        exposed_ms = gradient.elapsed_time(average)
        if self._before is not None:
            exposed_ms += self._before[-1].elapsed_time(start)
        self._before, self._events = self._events, self._before or self._four_events()
        return MeasuredTimes(compute_s=compute_ms / 1e3, exposed_s=exposed_ms / 1e3)

    def _four_events(self) -> list[torch.cuda.Event]:
        return [torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(4)]


class DeviceClocks:
    """Both clocks of a device: for local steps and for shared steps."""

    def __init__(self, device: torch.device) -> None:
        self.local = DeviceClock(device)
        self.shared = SharedClock(device)

    def restart(self) -> None:
        self.local.restart()
        self.shared.restart()
