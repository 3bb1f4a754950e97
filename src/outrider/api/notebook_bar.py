"""The progress of a run in a notebook: a widget if ipywidgets is installed, else a line of text in the cell.

Decides what counts as a notebook, and how its output shows progress. Used by `RunTalk` instead of the terminal's bar.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from outrider.api.progress_bar import ProgressBar


class ProgressOutput(Protocol):
    """A place in the output of a cell that can be changed."""

    def show(self, text: str, fraction: float | None) -> None: ...

    def close(self) -> None: ...


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; IPython in a terminal does not count."""
    # Looked up instead of imported, so that programs outside notebooks do not pay for importing IPython.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookBar(ProgressBar):
    """Shows progress below the cell; stays while the program prints, and disappears at the end of the run."""

    def __init__(self, output: ProgressOutput, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(sys.stderr, clock=clock)
        self._output = output
        self._fraction: float | None = None

    def show(self, label: str, fraction: float, *, loss: float | None = None) -> None:
        self._fraction = min(1.0, fraction)
        super().show(label, fraction, loss=loss)

    def _draw(self, text: str) -> None:
        self._drawn_s = self._clock()
        self._output.show(text, self._fraction)

    def clear(self) -> None:
        """Do nothing: printed text does not collide with the bar in a notebook."""

    def close(self) -> None:
        self._output.close()


class WidgetOutput:
    """A bar of ipywidgets with text beside it."""

    def __init__(self, widgets: Any, display: Callable[[Any], Any]) -> None:
        self._bar = widgets.FloatProgress(min=0.0, max=1.0)
        self._words = widgets.Label()
        self._box = widgets.HBox([self._bar, self._words])
        self._display = display
        self._is_shown = False

    def show(self, text: str, fraction: float | None) -> None:
        self._bar.value = fraction or 0.0
        self._words.value = _without_bar(text)
        if not self._is_shown:
            self._is_shown = True
            self._display(self._box)

    def close(self) -> None:
        for widget in (self._bar, self._words, self._box):
            widget.close()


class TextOutput:
    """One line of text that is replaced."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._shown: Any = None

    def show(self, text: str, fraction: float | None) -> None:
        self._put(text)

    def close(self) -> None:
        if self._shown is not None:
            self._put("")

    def _put(self, text: str) -> None:
        content = {"text/plain": text}
        if self._shown is None:
            self._shown = self._display(content, raw=True, display_id=True)
        else:
            self._shown.update(content, raw=True)


def open_notebook_bar() -> NotebookBar:
    """Open the bar of the notebook whose kernel is this process."""
    from IPython.display import display

    try:
        import ipywidgets
    except ImportError:
        return NotebookBar(TextOutput(display))
    return NotebookBar(WidgetOutput(ipywidgets, display))


def _without_bar(text: str) -> str:
    """Remove the bar drawn in characters from the terminal's line."""
    return "  ".join(part for part in text.split("  ") if not part.startswith("["))
