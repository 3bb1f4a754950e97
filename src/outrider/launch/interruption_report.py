"""The two lines printed when a signal ends a run: that it was received, and how to resume the run.

Decides the wording only. Called by the starter of the ranks, or by rank 0 under another launcher.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from outrider.errors import DataError
from outrider.record.checkpoint_files import epoch_of, find
from outrider.record.run_folder import shown_path

_STDERR = 2
_CLEAR_LINE = "\r\x1b[K"
"""On a terminal, overwrites the ^C that it shows and a progress bar."""


def say_stopping(number: signal.Signals, *, within_s: float | None = None) -> None:
    """Print that the signal was received; written directly to the descriptor, since a print may be in progress."""
    limit = "" if within_s is None else f" within {within_s:g} s"
    clear = _CLEAR_LINE if os.isatty(_STDERR) else ""
    text = f"{clear}outrider: {number.name}: stopping at the next average{limit}; again to end at once\n"
    os.write(_STDERR, text.encode())


def say_interrupted(folder: Path) -> None:
    """Print in one line how far an interrupted run got and how to resume it."""
    try:
        told = f'interrupted {_after(epoch_of(find(folder)[0]))}; pass resume="{shown_path(folder)}" to go on'
    except DataError:
        told = f"interrupted; {shown_path(folder)} has no checkpoint to go on from"
    print(f"outrider: {told}", file=sys.stderr, flush=True)


def _after(epochs: int) -> str:
    if not epochs:
        return "in the first epoch"
    return f"after {epochs} epoch{'' if epochs == 1 else 's'}"
