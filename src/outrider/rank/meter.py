"""Measures one rank: the time of its steps and averages, since the last average and since the start of the epoch.

The only owner of the window, the account of averages, the throttle and the clocks of a device. Decides which time
counts as compute and which as exposed. The driver and the step sources call it at starts and ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from outrider.policy.effects import AverageReport
from outrider.rank.device_clock import DeviceClocks
from outrider.rank.throttle import Throttle
from outrider.rank.window import AverageAccount, Window
from outrider.timeline.recorder import Recorder
from outrider.timeline.windows import WindowLog


class Meter:
    """Windows, averages and clocks of one rank. `clocks` are given if events on a device measure the steps."""

    def __init__(
        self, *, rank: int, throttle: Throttle, recorder: Recorder, clocks: DeviceClocks | None = None
    ) -> None:
        self._rank = rank
        self._throttle = throttle
        self._recorder = recorder
        self._activity = recorder.activity
        self._clocks = clocks
        self.is_on_device = clocks is not None
        """Whether events on a device measure the steps, so that the host need not wait for them."""
        self._window = Window()
        self._window_log = WindowLog(recorder, slept_s=lambda: throttle.slept_s)
        self._account = AverageAccount()
        self._samples = 0
        self._has_shared = False

    # Since the start of the epoch

    def open_epoch(self) -> None:
        self._account = AverageAccount()
        self._samples = 0
        self._recorder.reset_waits()

    @property
    def samples(self) -> int:
        """Samples of this rank's steps."""
        return self._samples

    @property
    def averages(self) -> int:
        return self._account.averages

    @property
    def average_cost_s(self) -> float:
        return self._account.cost_s

    @property
    def average_wait_s(self) -> float:
        return self._account.wait_s

    @property
    def slept_s(self) -> float:
        """Time slept by the throttle since the start of the run."""
        return self._throttle.slept_s

    # Steps

    @property
    def compute(self) -> Throttle:
        """Context manager around work that would take longer on a slower device."""
        return self._throttle

    def start_compute(self) -> None:
        """Enter `compute` for work that ends in another function."""
        self._throttle.__enter__()

    def stop_compute(self) -> None:
        self._throttle.__exit__(None, None, None)

    def took_gradient(self, samples: int, seconds: float, *, is_steady: bool = True) -> None:
        """Record the time of a gradient or a whole local step; only steady ones tell a rank's pace."""
        if is_steady:
            self._window.stepped(samples, seconds)
        else:
            self._window.set_up(samples, seconds)
        self._window_log.stepped(samples, seconds)
        self._activity.stepped(samples)

    def took_update(self, seconds: float) -> None:
        """Add compute time of a step whose gradient was already recorded."""
        self._window.compute_s += seconds

    def ended_step(self, samples: int, seconds: float) -> None:
        """Record the end of a local step."""
        # Not by took_gradient: each call counts where local steps take a fifth of a millisecond.
        self._window.stepped(samples, seconds)
        self._window_log.stepped(samples, seconds)
        self._activity.stepped(samples)
        self._samples += samples

    def paused(self, seconds: float) -> None:
        """Record time that the user's loop spent on something other than training."""
        self._window.paused_s += seconds

    def ended_shared_step(self, samples: int) -> None:
        self._window_log.averaged(self._window.exposed_s)
        self._activity.averaged(self._window.exposed_s)
        self._samples += samples

    # Steps on a device

    def begin_queued_step(self) -> None:
        """Prepare to queue a local step; shared steps have their own clock."""
        if self._has_shared and self._clocks is not None:
            self._clocks.local.restart()
            self._has_shared = False

    def queued_step(self, *, is_steady: bool) -> None:
        """Record that a local step was queued; returns when there is room for the next."""
        if self._clocks is not None:
            self._clocks.local.stepped(is_steady=is_steady)

    def mark(self) -> None:
        """Mark the next of the four moments of a shared step in the queue: start, gradient, average, update."""
        assert self._clocks is not None
        self._clocks.shared.mark()

    def ended_queued_shared_step(self, samples: int, *, is_steady: bool) -> None:
        """Wait for the last of the four marks. The first shared step includes warm-up and tells nothing about speed."""
        assert self._clocks is not None
        measured = self._clocks.shared.measured()
        self.took_gradient(samples, measured.compute_s, is_steady=self._has_shared and is_steady)
        self._has_shared = True
        self._window.exposed_s = measured.exposed_s
        self._activity.move("compute", "average", measured.exposed_s)

    def skip_pause(self) -> None:
        """Continue the window after a pause in which the device was idle."""
        if self._clocks is not None:
            self._clocks.local.skip_pause()
            self._clocks.shared.restart()

    def restart_clocks(self) -> None:
        """Restart the clocks, because the next step follows no other step."""
        if self._clocks is not None:
            self._clocks.restart()

    # Windows and averages

    @property
    def window_samples(self) -> int:
        """Samples since the last average."""
        return self._window.samples

    def facts(
        self, *, loss: tuple[float, int], is_dry: bool, wants_stop: bool, wants_pause: bool, wants_layout: bool = False
    ) -> list[float]:
        """The facts of this rank's window, sent with the next average; resets the counters of the window."""
        return self._window.facts(
            loss=loss, is_dry=is_dry, wants_stop=wants_stop, wants_pause=wants_pause, wants_layout=wants_layout
        )

    @contextlib.contextmanager
    def gap(self) -> Iterator[None]:
        """Context manager around work that is no step but takes time from the compute path."""
        if self._clocks is not None:
            with self._clocks.local.gap():
                yield
            return
        started_s = time.perf_counter()
        yield
        self._window.exposed_s += time.perf_counter() - started_s

    def wait_for_device(self, wait: Callable[[], None]) -> None:
        """Wait for kernels, which run behind the host: the window's time ends with them."""
        started_s = time.perf_counter()
        wait()
        waited_s = time.perf_counter() - started_s
        self._window.compute_s += waited_s
        self._window_log.waited_for_device(waited_s)

    def end_window(self, number: int) -> None:
        """Close the measurement of a window's steps."""
        if self._clocks is not None:
            measured = self._clocks.local.measure(self._window.batches)
            self._window.compute_s = measured.compute_s
            self._window.exposed_s += measured.exposed_s
            self._window.setup_s += measured.setup_s
            self._window.busy_s += measured.slowed_s
        self._window_log.end(number)

    def end_log(self) -> None:
        """Close the log of steps that no average follows."""
        self._window_log.end()

    def took_average(self, seconds: float) -> None:
        """Record the time of a blocking average of parameters."""
        self._window.exposed_s = seconds
        if self._clocks is not None:
            self._clocks.local.restart()

    def began(self) -> None:
        """Record that an average started in the background."""
        if self._clocks is not None:
            self._clocks.local.average_began()

    def took_in(self, *, waited_ms: float, average_ms: float, busy_ms: float) -> None:
        """Record that a background average was applied; `waited_ms` is part of the gap around that."""
        self._window.waited_s += waited_ms / 1e3
        self._window.average_s = average_ms / 1e3
        self._window.busy_s = busy_ms / 1e3
        if self._clocks is not None:
            self._clocks.local.average_ended()

    def set_exposed(self, seconds: float) -> None:
        """Set how long the last average of gradients kept this rank from computing."""
        self._window.exposed_s = seconds

    def add_exposed(self, seconds: float) -> None:
        """Add exposed time that occurs before the next step."""
        self._window.exposed_s += seconds

    def rested(self, seconds: float, *, elapsed_s: float) -> None:
        """Record that this rank had nothing to do for `seconds` of the time up to a meeting."""
        self._window.exposed_s = elapsed_s - seconds
        self._account.wait_s += seconds
        self._recorder.wait("rest", seconds)
        self._has_shared = False
        self.restart_clocks()

    def waited_for_others(self, seconds: float) -> None:
        """Record time in which this rank had taken its last step of a segment, but others had not."""
        self._account.wait_s += seconds
        self._window.border_s += seconds
        self._recorder.wait("epoch boundary", seconds)
        # The device was idle: it would look like compute in the window that is not averaged yet.
        if self._clocks is not None:
            self._clocks.local.skip_pause()

    def charge(self, report: AverageReport, *, is_blocking: bool, is_average: bool) -> float:
        """Account for the previous average from the ranks' report.

        Returns how long this rank waited in a blocking average, in s; a wait for one in the background was recorded
        when it happened.
        """
        before_s = self._account.wait_s
        self._account.averages += is_average
        self._account.charge(report, self._rank, is_blocking=is_blocking)
        return self._account.wait_s - before_s if is_blocking else 0.0
