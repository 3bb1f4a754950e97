"""Turns a rank's steps into one event per window: its start, its duration, and its parts.

The caller decides when a window ends. Every shared step ends a window. To limit the number of events, the shared steps
of a quarter of a second become one event.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.timeline.recorder import Recorder

SHARED_WINDOW_S = 0.25


class WindowLog:
    """The steps since the last event of kind `window`."""

    def __init__(self, recorder: Recorder, *, slept_s: Callable[[], float]) -> None:
        """`slept_s` returns the total sleep of the throttle."""
        self._recorder = recorder
        self._slept_s = slept_s
        self._start_s: float | None = None
        self._batches = self._samples = 0
        self._compute_s = self._average_s = 0.0
        self._data_before_s = self._slept_before_s = 0.0

    def stepped(self, samples: int, seconds: float) -> None:
        """Add a step that ended now; a step without samples is a shared step in which the rank took no part."""
        if self._start_s is None:
            self._start_s = self._recorder.now_s() - seconds
            self._data_before_s = self._recorder.wait_s["data"]
            self._slept_before_s = self._slept_s()
        self._batches += samples > 0
        self._samples += samples
        self._compute_s += seconds

    def waited_for_device(self, seconds: float) -> None:
        """Add compute time of kernels that were still running."""
        self._compute_s += seconds

    def averaged(self, seconds: float) -> None:
        """Add the average inside a shared step, including waits."""
        self._average_s += seconds
        if self._start_s is not None and self._recorder.now_s() - self._start_s >= SHARED_WINDOW_S:
            self.end()

    def end(self, window: int | None = None) -> None:
        """End the window now; `window` is its number if the window ends with its own average."""
        if self._start_s is None:
            return
        recorder = self._recorder
        parts = {
            "compute_ms": self._compute_s,
            "average_ms": self._average_s,
            "data_ms": recorder.wait_s["data"] - self._data_before_s,
            "throttle_ms": self._slept_s() - self._slept_before_s,
        }
        recorder.event(
            "window",
            **({} if window is None else {"window": window}),
            start=round(self._start_s, 6),
            batches=self._batches,
            samples=self._samples,
            **{name: round(seconds * 1e3, 3) for name, seconds in parts.items() if seconds > 0},
        )
        self._clear()

    def _clear(self) -> None:
        self._start_s = None
        self._batches = self._samples = 0
        self._compute_s = self._average_s = 0.0
