"""Prints the output of a run on stderr: a line at the start, a progress bar, and a line at the end.

Decides when to print: in a terminal or a notebook, unless `quiet` says otherwise. Used by `train()` in the process that
started the ranks, and by rank 0 of a session or under torchrun.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from outrider.api.notebook_bar import in_notebook, open_notebook_bar
from outrider.api.progress_bar import ProgressBar
from outrider.api.run_lines import end_line, start_line, wrap_line
from outrider.average.transport.backend_table import BackendChoice
from outrider.world.messages import Message


class RunTalk:
    """The output of one run; silent if `is_on` is false."""

    def __init__(self, *, is_on: bool = False, bar: ProgressBar | None = None) -> None:
        self.is_on = is_on
        self.bar = bar
        """None outside of a terminal or a notebook."""
        self.is_stopping = False
        """Whether a signal arrived; the bar is then not drawn again. Signal handlers set this: they must not print."""
        self._epoch = 0
        self._samples: dict[int, int] = {}
        """Samples of each rank in this epoch, as last reported."""
        self._start_line: Callable[..., str] | None = None

    @classmethod
    def open(cls, quiet: bool | Literal["auto"], *, is_main: bool = True) -> RunTalk:
        """Open the output of a run; of several ranks only the main one prints."""
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        # Prompts and notebooks set ps1; a notebook's stderr is not a terminal.
        is_watched = is_terminal or hasattr(sys, "ps1")
        if not is_main or quiet is True or (quiet == "auto" and not is_watched):
            return cls()
        if in_notebook():
            return cls(is_on=True, bar=open_notebook_bar())
        has_bar = is_terminal and os.environ.get("TERM") != "dumb"
        return cls(is_on=True, bar=ProgressBar(sys.stderr) if has_bar else None)

    def introduce(self, devices: Sequence[str], *, policy: str, folder: Path) -> None:
        """Set the contents of the first line, except for facts that are known only with the optimizer."""
        self._start_line = partial(start_line, devices, policy=policy, folder=folder)

    def await_ranks(self, devices: Sequence[str]) -> None:
        """Show that ranks are being started."""
        if self.bar is not None:
            self.bar.say(f"starting {len(devices)} rank{'' if len(devices) == 1 else 's'}")

    def begin(self, learning: str | None) -> None:
        """Print the line at the start, once; `learning` describes what the run changes about learning."""
        line, self._start_line = self._start_line, None
        if line is not None:
            self._say(line(learning=learning))

    def wrapped(self, devices: Sequence[str], *, backend: BackendChoice) -> None:
        """Print the line of `wrap()`."""
        self._say(wrap_line(devices, backend=backend))

    def chose(self, steps: str, reason: str) -> None:
        """Print which steps the policy `auto` chose, and why."""
        self._say(f"{steps} steps: {reason}")

    def saw(self, message: Message) -> None:
        """Show messages from ranks of `train()`: the start and their progress."""
        if message.kind == "learning":
            self.begin(message.fields["words"])
        elif message.kind == "choice":
            self.chose(message.fields["value"], message.fields["reason"])
        elif message.kind == "micro-batch":
            device, size, reason = (message.fields[name] for name in ("device", "value", "reason"))
            self._say(f"rank {message.rank} ({device}) computes micro-batches of {size} from now on: {reason}")
        elif self.bar is not None and message.kind == "progress":
            self._note_samples(message)
            if message.rank == 0 and self.bar.is_due() and not self.is_stopping:
                fields = message.fields
                # Under torchrun only rank 0 reports; it learns the samples of other ranks from averages.
                done = fields["seen"] + max(fields["reached"], sum(self._samples.values()))
                label = f"epoch {fields['epoch'] + 1}/{fields['num_epochs']}"
                self.bar.show(label, min(1.0, done / fields["total"]), loss=fields["loss"])

    def _note_samples(self, message: Message) -> None:
        if message.fields["epoch"] != self._epoch:
            self._epoch, self._samples = message.fields["epoch"], {}
        self._samples[message.rank] = message.fields["samples"]

    def pause(self) -> None:
        """Remove the bar before the user's program continues."""
        if self.bar is not None:
            self.bar.clear()

    def warn(self, text: str) -> None:
        """Print a warning, even if the run is quiet."""
        self.pause()
        print(f"outrider: {text}", file=sys.stderr, flush=True)

    def end(self, folder: Path) -> None:
        """Print the line at the end of a run that was not interrupted."""
        if self.bar is not None:
            self.bar.close()
        line = end_line(folder) if self.is_on else None
        if line is not None:
            self._say(line)

    def _say(self, text: str) -> None:
        self.pause()
        if self.is_on:
            print(_wrapped(f"outrider: {text}"), file=sys.stderr, flush=True)


def _wrapped(line: str) -> str:
    """The line; on a terminal, broken between words where the terminal would break it anywhere."""
    if not sys.stderr.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
