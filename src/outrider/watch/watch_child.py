"""Starts the live page of a run in a process of its own, so that it takes no time from the process that trains.

Decides how the page is started and ended. Called by whoever starts a run with `watch=True`.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from outrider.watch.watch_server import check_installed

START_S = 20.0
END_S = 5.0
VARIABLE = "OUTRIDER_WATCH"
"""Set by `outrider run --watch`."""


def wants_page(option: bool) -> bool:
    """Whether the option or the command line asks for the page; raises where its libraries are missing."""
    is_wanted = option or os.environ.get(VARIABLE) == "1"
    if is_wanted:
        check_installed()
    return is_wanted


class WatchChild:
    """The process of a page; `close()` ends it, and so does the end of this process."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "outrider.watch.watch_process", str(folder)]
        # Its own session: Ctrl-C is for the training, whose end the page still shows.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self.address = self._await_address()
        """None where the page could not be started; its own words are on stderr."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the page show the last view, then end it."""
        process = self._process
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _await_address(self) -> str | None:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_S)
        line = self._process.stdout.readline().decode().strip() if ready else ""
        return line or None


def open_page(folder: Path) -> WatchChild:
    """Start the page of a run and print its address."""
    child = WatchChild(folder)
    words = f"watch this run at {child.address}" if child.address else "the live page could not be started"
    print(f"outrider: {words}", file=sys.stderr, flush=True)
    return child
