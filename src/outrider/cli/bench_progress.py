"""Shows the progress of a sweep on stderr: a live display on a terminal, plain lines elsewhere.

Decides what is shown; the remaining time is that of the whole sweep. Starts nothing, prints no result. Used by `bench
run`, `bench sweep` and `bench rerun`.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from outrider.bench.measures import samples_per_s
from outrider.bench.suite.runs import Case, SuiteRun
from outrider.bench.suite.sweep import Eta, duration
from outrider.cli.progress import ModeView, live, live_lines
from outrider.errors import OutriderError
from outrider.world.messages import Message

EPOCH_LINE_EVERY_S = 30.0
"""Interval of lines for long runs, so that they show progress without filling a log."""


@contextmanager
def open_sweep_watcher(
    cases: Sequence[Case], console: Console | None = None, *, num_jobs: int = 1
) -> Iterator[SweepProgress]:
    """A live display if stderr is a terminal, plain lines otherwise."""
    console = console or Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield PlainSweep(cases, console, num_jobs=num_jobs)
        return
    watcher = LiveSweep(cases, console, num_jobs=num_jobs)
    with live(watcher.picture, console):
        yield watcher


@dataclass(frozen=True, kw_only=True, slots=True)
class UnderWay:
    """A running run."""

    view: ModeView
    place: str
    """Which one of all it is: [3/12]."""
    began_s: float


class SweepProgress(abc.ABC):
    """The progress of a sweep; finished runs stay as lines."""

    def __init__(
        self,
        cases: Sequence[Case],
        console: Console,
        *,
        num_jobs: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_cases = len(cases)
        self._console = console
        self._clock = clock
        self._num_jobs = num_jobs
        self._eta = Eta(cases, num_jobs=num_jobs)
        self._num_skipped = 0
        self._under_way: dict[str, UnderWay] = {}
        """By the key of the case, in the order they began in."""
        self._told_s = 0.0

    # Called by the sweep

    def skipped(self, case: Case) -> None:
        self._eta.skipped(case)
        self._num_skipped += 1

    def begin(self, case: Case) -> None:
        self._tell_skipped()
        self._told_s = self._clock()
        devices = case.devices
        if case.mode.startswith("solo-"):
            rank = int(case.mode.removeprefix("solo-"))
            devices = devices[rank : rank + 1]
        position = self._num_ended + len(self._under_way)
        view = ModeView(_name(case), devices=devices, position=position, num_modes=self._num_cases, epochs=case.epochs)
        place = f"[{position + 1:>{len(str(self._num_cases))}}/{self._num_cases}]"
        self._under_way[case.key] = UnderWay(view=view, place=place, began_s=self._told_s)

    def saw(self, case: Case, message: Message) -> None:
        run = self._under_way[case.key]
        run.view.saw(message)
        if message.kind == "epoch":
            self.tell_epoch(run)

    def ended(self, run: SuiteRun) -> None:
        place = self._close(run.case)
        self.print(f"{place} {ended_words(run)}{self._eta_words()}")

    def failed(self, case: Case, error: OutriderError) -> None:
        place = self._close(case)
        self.print(f"{place} {_name(case)}: failed: {error.message}{self._eta_words()}")

    def finish(self) -> None:
        """End of the sweep; reports all skipped runs."""
        self._tell_skipped()

    # Display

    @abc.abstractmethod
    def tell_epoch(self, run: UnderWay) -> None:
        """An epoch of a running run has ended."""

    def print(self, line: str) -> None:
        self._console.print(Text(line))

    @property
    def _num_ended(self) -> int:
        """Skipped ones too."""
        return self._num_cases - self._eta.num_left

    def _close(self, case: Case) -> str:
        """The run is over; returns which one of all it was."""
        run = self._under_way.pop(case.key)
        self._eta.ended(case, self._clock() - run.began_s)
        return run.place

    def _eta_words(self) -> str:
        now_s = self._clock()
        left_s = self._eta.left_s(elapsed_s=sum(now_s - run.began_s for run in self._under_way.values()))
        return f", ETA {duration(left_s)}" if left_s else ""

    def _tell_skipped(self) -> None:
        if self._num_skipped:
            what = "1 run is" if self._num_skipped == 1 else f"{self._num_skipped} runs are"
            self.print(f"{what} finished already, skipped")
            self._num_skipped = 0


class PlainSweep(SweepProgress):
    """Lines only: now and then one for a run that takes long."""

    def tell_epoch(self, run: UnderWay) -> None:
        now_s = self._clock()
        if now_s - self._told_s < EPOCH_LINE_EVERY_S:
            return
        self._told_s = now_s
        self.print(f"{_run_line(run)}{self._eta_words()}")


class LiveSweep(SweepProgress):
    """A live display of the running run, or a line for each of several, below the lines of finished runs."""

    def tell_epoch(self, run: UnderWay) -> None:
        """The picture shows it."""

    def picture(self) -> Text:
        # A copy: the picture is drawn by a thread of its own.
        under_way = list(self._under_way.values())
        if not under_way:
            return Text("")
        left = self._eta_words().removeprefix(", ")
        sweep = f"  sweep: {self._num_ended} of {self._num_cases} runs done"
        # Of parallel runs only their epochs are shown.
        runs = live_lines(under_way[0].view) if self._num_jobs == 1 else [_run_line(run) for run in under_way]
        return Text("\n".join([*runs, f"{sweep}  {left}".rstrip()]), no_wrap=True, overflow="crop")


def _run_line(run: UnderWay) -> str:
    return f"{run.place} {run.view.mode}: {_epoch_words(run.view)}"


def _epoch_words(view: ModeView) -> str:
    loss = "" if view.loss is None else f", loss {view.loss:.3f}"
    return f"epoch {view.epochs_done}/{view.epochs}{loss}"


def _name(case: Case) -> str:
    return f"{case.title} {case.mode} seed {case.seed}"


def ended_words(run: SuiteRun) -> str:
    last = run.epochs[-1]
    metric = run.subject.metric
    if not run.case.is_timed:
        return f"{_name(run.case)}: {'done' if last.eval is None else f'{metric} {last.eval:.4g}'}"
    evaluated = "" if last.eval is None else f", {metric} {last.eval:.4g}"
    return f"{_name(run.case)}: {samples_per_s(run.epochs):,.0f} samples/s{evaluated}, {last.train_s:.1f} s"
