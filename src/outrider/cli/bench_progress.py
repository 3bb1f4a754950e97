"""What is shown while a sweep runs: a live picture on a terminal, plain lines elsewhere; always on stderr.

Decides what a user sees of the runs, and that the time left is that of the whole sweep. Starts nothing, prints no
result. Used by `bench run`, `bench sweep` and `bench rerun`.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from outrider.bench.measures import samples_per_s
from outrider.bench.suite.case import Case
from outrider.bench.suite.eta import Eta, duration
from outrider.bench.suite.runs import SuiteRun
from outrider.cli.progress import ModeView, live, live_lines
from outrider.errors import OutriderError
from outrider.runtime.messages import Message

EPOCH_LINE_EVERY_S = 30.0
"""A run of hundreds of epochs must show that it lives without filling a log."""


@contextmanager
def open_sweep_watcher(cases: Sequence[Case], console: Console | None = None) -> Iterator[SweepProgress]:
    """A live picture where stderr is a terminal, plain lines where it is not."""
    console = console or Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield PlainSweep(cases, console)
        return
    watcher = LiveSweep(cases, console)
    with live(watcher.picture, console):
        yield watcher


class SweepProgress(abc.ABC):
    """Where a sweep stands; runs that ended stay as lines."""

    def __init__(self, cases: Sequence[Case], console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_cases = len(cases)
        self._console = console
        self._clock = clock
        self._eta = Eta(cases)
        self._num_skipped = 0
        self._view: ModeView | None = None
        self._began_s = 0.0
        self._told_s = 0.0

    # What the sweep tells

    def skipped(self, case: Case) -> None:
        self._eta.skipped(case)
        self._num_skipped += 1

    def begin(self, case: Case) -> None:
        self._tell_skipped()
        self._began_s = self._told_s = self._clock()
        devices = case.devices
        if case.mode.startswith("solo-"):
            rank = int(case.mode.removeprefix("solo-"))
            devices = devices[rank : rank + 1]
        self._view = ModeView(
            _name(case), devices=devices, position=self._position, num_modes=self._num_cases, epochs=case.epochs
        )

    def saw(self, message: Message) -> None:
        assert self._view is not None
        self._view.saw(message)
        if message.kind == "epoch":
            self.tell_epoch(self._view)

    def ended(self, run: SuiteRun) -> None:
        place = self._place()
        self._close(run.case)
        self.print(f"{place} {ended_words(run)}{self._eta_words()}")

    def failed(self, case: Case, error: OutriderError) -> None:
        place = self._place()
        self._close(case)
        self.print(f"{place} {_name(case)}: failed: {error.message}{self._eta_words()}")

    def finish(self) -> None:
        """The sweep is over; nothing that was skipped goes unsaid."""
        self._tell_skipped()

    # What is shown of it

    @abc.abstractmethod
    def tell_epoch(self, view: ModeView) -> None:
        """An epoch of the run under way has ended."""

    def print(self, line: str) -> None:
        self._console.print(Text(line))

    @property
    def _position(self) -> int:
        return self._num_cases - self._eta.num_left

    def _place(self) -> str:
        width = len(str(self._num_cases))
        return f"[{self._position + 1:>{width}}/{self._num_cases}]"

    def _close(self, case: Case) -> None:
        self._eta.ended(case, self._clock() - self._began_s)
        self._view = None

    def _eta_words(self) -> str:
        elapsed_s = 0.0 if self._view is None else self._clock() - self._began_s
        left_s = self._eta.left_s(elapsed_s=elapsed_s)
        return f", ETA {duration(left_s)}" if left_s else ""

    def _tell_skipped(self) -> None:
        if self._num_skipped:
            what = "1 run is" if self._num_skipped == 1 else f"{self._num_skipped} runs are"
            self.print(f"{what} finished already, skipped")
            self._num_skipped = 0


class PlainSweep(SweepProgress):
    """Lines only: now and then one for a run that takes long."""

    def tell_epoch(self, view: ModeView) -> None:
        now_s = self._clock()
        if now_s - self._told_s < EPOCH_LINE_EVERY_S:
            return
        self._told_s = now_s
        loss = "" if view.loss is None else f", loss {view.loss:.3f}"
        self.print(f"{self._place()} {view.mode}: epoch {view.epochs_done}/{view.epochs}{loss}{self._eta_words()}")


class LiveSweep(SweepProgress):
    """A picture of the run under way, below the lines."""

    def tell_epoch(self, view: ModeView) -> None:
        """The picture shows it."""

    def picture(self) -> Text:
        view = self._view
        if view is None:
            return Text("")
        left = self._eta_words().removeprefix(", ")
        sweep = f"  sweep: {self._position} of {self._num_cases} runs done"
        lines = [*live_lines(view), f"{sweep}  {left}".rstrip()]
        return Text("\n".join(lines), no_wrap=True, overflow="crop")


def _name(case: Case) -> str:
    return f"{case.title} {case.mode} seed {case.seed}"


def ended_words(run: SuiteRun) -> str:
    last = run.epochs[-1]
    metric = run.subject.metric
    evaluated = "" if last.eval is None else f", {metric} {last.eval:.4g}"
    return f"{_name(run.case)}: {samples_per_s(run.epochs):,.0f} samples/s{evaluated}, {last.train_s:.1f} s"
