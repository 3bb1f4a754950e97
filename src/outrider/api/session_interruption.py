"""Handles SIGINT and SIGTERM in a session: the user's loop ends at the next average, on all ranks.

Decides when the signal is raised in the user's loop. `rank` saves the checkpoint before that.
"""

from __future__ import annotations

import signal

from outrider.launch.interruption import SignalGuard, ending
from outrider.launch.interruption_report import say_interrupted, say_stopping
from outrider.rank.session_run import SessionRun
from outrider.world.messages import Link


class SessionInterruption:
    """Catches signals during an open session; ranks of our own launcher already catch them in their main function."""

    def __init__(self) -> None:
        self.is_raised = False
        """Whether a signal ended the user's loop; after that the ranks do not synchronise again."""
        self._link: Link | None = None
        self._guard = SignalGuard(self._on_signal)

    def open(self, link: Link) -> None:
        self._link = link
        self._guard.open()

    def close(self) -> None:
        self._guard.close()

    def _on_signal(self, number: signal.Signals) -> None:
        assert self._link is not None, "open() comes first"
        self._link.interrupt(number)
        if self._link.rank == 0:
            say_stopping(number)

    def raise_due(self, run: SessionRun) -> None:
        """End the user's loop if all ranks agreed on a signal; `with` closes the session as usual."""
        if run.interrupted_by is None:
            return
        if not self.is_raised:
            self.is_raised = True
            run.interrupt()
            if run.world.rank == 0 and not run.link.owns_process:
                say_interrupted(run.folder.path)
        raise ending(run.interrupted_by)

    def raise_late(self, link: Link) -> None:
        """Raise a signal that arrived after the last average, so that it is not lost."""
        if link.interrupted_by is not None and not self.is_raised:
            raise ending(link.interrupted_by)
