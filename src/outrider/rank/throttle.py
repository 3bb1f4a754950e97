"""Slows a rank down to the speed in its device spec, so that any machine has mismatched devices.

Decides how long to sleep after compute. The meter decides what counts as compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

# The shortest sleep worth asking for; below it the system's timer decides.
_MIN_SLEEP_S = 1e-3


class Throttle:
    """Context manager around compute; at its end it sleeps in proportion to the CPU time used.

    It uses CPU time of the calling thread, not wall time, so other load on the machine does not change the ratio.
    """

    def __init__(
        self,
        speed: float,
        *,
        cpu_clock: Callable[[], float] = time.thread_time,
        wall_clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.slept_s = 0.0
        self._sleep_per_compute = 1.0 / speed - 1.0
        self._cpu_clock = cpu_clock
        self._wall_clock = wall_clock
        self._sleep = sleep
        self._owed_s = 0.0
        self._entered_s = 0.0

    def __enter__(self) -> Throttle:
        if self._sleep_per_compute > 0.0:
            self._entered_s = self._cpu_clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None or self._sleep_per_compute <= 0.0:
            return
        self._owed_s += (self._cpu_clock() - self._entered_s) * self._sleep_per_compute
        if self._owed_s >= _MIN_SLEEP_S:
            self._pay()

    def _pay(self) -> None:
        """Sleep for the time owed; carry over the system's error in either direction."""
        before_s = self._wall_clock()
        self._sleep(self._owed_s)
        slept_s = self._wall_clock() - before_s
        self.slept_s += slept_s
        self._owed_s -= slept_s
