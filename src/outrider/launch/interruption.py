"""Catches SIGINT and SIGTERM, so that a run can stop in an orderly way instead of ending the process at once.

Decides when a signal is caught: in the main thread, and only if the user has installed no handler. The owner of the
guard (the handle of a run, a session, or the process of a rank) decides how to react.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from outrider.world.messages import Link
from outrider.world.short_traceback import end_silently

SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPEAT_S = 1.0
"""Launchers forward a signal to ranks that already received it; a repetition within this time is the same signal."""
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)

OnSignal = Callable[[signal.Signals], None]

_guards: dict[signal.Signals, list[SignalGuard]] = {number: [] for number in SIGNALS}
"""The open guards of this process; our handler is installed while there is at least one."""
_before: dict[signal.Signals, Any] = {}
"""The handlers that were installed before the first guard."""


class SignalGuard:
    """Between `open` and `close`, calls `on_signal` at the first of these signals and `on_repeat` at every later one.

    Without `on_repeat`, the second signal has the effect that it would have had without the guard. A guard does
    nothing if another handler is installed, or outside of the main thread.
    """

    def __init__(
        self, on_signal: OnSignal, *, on_repeat: OnSignal | None = None, numbers: Sequence[signal.Signals] = SIGNALS
    ) -> None:
        self._on_signal = on_signal
        self._on_repeat = on_repeat
        self._numbers = numbers
        self._owner_pid = os.getpid()
        self._first_at_s: float | None = None

    def open(self) -> SignalGuard:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if _guards[number] or signal.getsignal(number) in _DEFAULTS:
                    self._add(number)
        return self

    def _add(self, number: signal.Signals) -> None:
        if not _guards[number]:
            _before[number] = signal.signal(number, _handle)
        if self not in _guards[number]:
            _guards[number].append(self)

    def close(self) -> None:
        """Restore the previous handlers if no other guard is open."""
        for number in SIGNALS:
            if self in _guards[number]:
                _guards[number].remove(self)
                if not _guards[number]:
                    _restore(number)

    def __enter__(self) -> SignalGuard:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def receive(self, number: signal.Signals) -> None:
        if os.getpid() != self._owner_pid:
            _act_as_before(number)
        elif self._first_at_s is None:
            self._first_at_s = time.monotonic()
            self._on_signal(number)
        elif time.monotonic() - self._first_at_s < REPEAT_S:
            return
        elif self._on_repeat is not None:
            self._on_repeat(number)
        else:
            _act_as_before(number)


def _handle(number: int, frame: FrameType | None) -> None:
    for guard in list(_guards[signal.Signals(number)]):
        guard.receive(signal.Signals(number))


def _restore(number: signal.Signals) -> None:
    # Keep a handler that the user has installed in the meantime.
    if signal.getsignal(number) is _handle and threading.current_thread() is threading.main_thread():
        signal.signal(number, _before[number])


def _act_as_before(number: signal.Signals) -> None:
    """Restore the previous handler and send the signal again; forked processes, which inherit our handler, do this."""
    _restore(number)
    os.kill(os.getpid(), number)


def is_interruption(error: BaseException, link: Link) -> bool:
    """Whether a signal ended the run: by KeyboardInterrupt, or by another non-Exception after a caught signal."""
    if isinstance(error, Exception):
        return False
    return link.interrupted_by is not None or isinstance(error, KeyboardInterrupt)


def ending(number: signal.Signals) -> BaseException:
    """The exception for a signal, without a traceback: KeyboardInterrupt, or else SystemExit with 128 + signal."""
    return end_silently(KeyboardInterrupt()) if number == signal.SIGINT else SystemExit(128 + number)
