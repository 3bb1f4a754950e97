"""A progress bar in one line of a terminal: how much of a run is done, and how long the rest will take.

Decides how the line looks, how often it is drawn, and that it disappears before anything else is printed. Draws
nothing while a bar of tqdm is open. Used by `RunTalk`.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

DRAW_EVERY_S = 0.25
_WIDTH = 24
_CLEAR_LINE = "\r\x1b[K"
_STREAMS = ("stdout", "stderr")


class ProgressBar:
    """A bar that `show()` draws and `clear()` removes; output of the program removes it too."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._start: tuple[float, float] | None = None
        """Time and fraction when the bar was first drawn; a resumed run does not begin at 0."""
        self._drawn_s = float("-inf")
        self._is_drawn = False
        self._replaced: dict[str, TextIO] = {}

    def is_due(self) -> bool:
        """Whether it is time to draw the bar again."""
        return self._clock() - self._drawn_s >= DRAW_EVERY_S

    def say(self, text: str) -> None:
        """Show a text instead of the bar."""
        self._draw(text)

    def show(self, label: str, fraction: float, *, loss: float | None = None) -> None:
        """Draw the bar: `fraction` of the whole run is done."""
        now_s = self._clock()
        self._start = self._start or (now_s, fraction)
        if not _is_tqdm_open():
            self._draw(bar_text(label, fraction, loss=loss, eta_s=self._eta_s(now_s, fraction)))

    def clear(self) -> None:
        """Remove the bar before something else is printed."""
        self._wipe()
        for name, stream in self._replaced.items():
            if isinstance(getattr(sys, name), _ClearingStream):
                setattr(sys, name, stream)
        self._replaced = {}

    def close(self) -> None:
        """Remove the bar for good, at the end of the run."""
        self.clear()

    def _eta_s(self, now_s: float, fraction: float) -> float | None:
        assert self._start is not None
        since_s, before = self._start
        return (now_s - since_s) * (1 - fraction) / (fraction - before) if fraction > before else None

    def _draw(self, text: str) -> None:
        self._drawn_s = self._clock()
        self._stream.write(_CLEAR_LINE + text[: shutil.get_terminal_size().columns - 1])
        self._stream.flush()
        self._is_drawn = True
        self._watch_output()

    def _wipe(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()

    def _watch_output(self) -> None:
        for name in _STREAMS:
            stream = getattr(sys, name)
            if name not in self._replaced and stream is not None and stream.isatty():
                self._replaced[name] = stream
                setattr(sys, name, _ClearingStream(stream, self._wipe))


class _ClearingStream:
    """Wraps the user's stream and removes the bar before text is written."""

    def __init__(self, stream: TextIO, wipe: Callable[[], None]) -> None:
        self._stream = stream
        self._wipe = wipe

    def write(self, text: str) -> int:
        self._wipe()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def bar_text(label: str, fraction: float, *, loss: float | None, eta_s: float | None) -> str:
    """The text of the bar, for 80 columns."""
    done = round(min(1.0, fraction) * _WIDTH)
    parts = [label, f"[{'#' * done}{'.' * (_WIDTH - done)}]", f"{fraction:4.0%}"]
    if loss is not None:
        parts.append(f"loss {loss:.3f}")
    if eta_s is not None:
        parts.append(f"ETA {_duration(eta_s)}")
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _is_tqdm_open() -> bool:
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return bool(getattr(tqdm, "_instances", None))
