"""The handle of a run: epochs as they end, the trained state, and a way to stop.

Decides how a program waits for its run. `launch.ranks` watches ranks that were started; under torchrun this process
is itself a rank.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import os
import signal
import sys
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

from outrider.api.run_html import run_html
from outrider.api.run_talk import RunTalk
from outrider.errors import OutriderError
from outrider.launch.interruption import SignalGuard, ending
from outrider.launch.interruption_report import say_interrupted, say_stopping
from outrider.launch.ranks import Ranks
from outrider.record.epoch_metrics import EpochMetrics, from_json
from outrider.record.run_config import DEFAULT_GRACE_S
from outrider.record.run_folder import RunFolder, load_into, load_model
from outrider.record.run_record import close_record
from outrider.record.run_timeline import complete_timeline, prepare_timeline
from outrider.timeline.sampler import Sampler
from outrider.watch.watch_child import WatchChild
from outrider.world.messages import Link, Message

Model = TypeVar("Model", bound=nn.Module)
ENDED = ("finished", "stopped", "interrupted")
"""The states in a record that mean an orderly end of the run."""

_ENDED_AT_EXIT = """\
outrider: the program ended before its run, so the run was ended too; what it left is in {folder}
hint: call join() on the handle to wait for the run, or stop() and join() to end it early and keep the model"""
_FAILED_UNSEEN = """\
outrider: the run in {folder} failed, and the program did not look: {error}
hint: call join() on the handle, which raises what made a run fail"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The result of a run: its epochs, and its folder with model and records."""

    epochs: tuple[EpochMetrics, ...]
    run_dir: Path
    model_file: Path
    """In `run_dir`, or in another folder if the disk was full at the end."""

    def _repr_html_(self) -> str:
        return run_html(self.run_dir)

    @property
    def state_dict(self) -> dict[str, torch.Tensor]:
        return load_model(self.model_file)

    def load_into(self, model: Model) -> Model:
        """Load the trained parameters and buffers into a model of the same architecture, and return it."""
        load_into(model, self.model_file)
        return model


class Run(abc.ABC):
    """The handle of a run: iterate over its epochs, `poll()`, `stop()` or `join()` it."""

    def __init__(self, folder: RunFolder, talk: RunTalk) -> None:
        self._folder = folder
        self._talk = talk
        self.epochs: list[EpochMetrics] = []
        """The epochs received so far."""
        self._num_polled = 0
        self._model_file: Path | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} in {str(self.run_dir)!r}: {len(self.epochs)} epochs so far>"

    @property
    def run_dir(self) -> Path:
        """The run folder; under torchrun rank 0 chooses it, and it is known once the ranks have joined."""
        return self._folder.path

    def __iter__(self) -> Iterator[EpochMetrics]:
        """Yield each epoch as it ends, from the first; raises the error of a failed rank."""
        seen = 0
        while True:
            while seen < len(self.epochs):
                seen += 1
                self._talk.pause()
                yield self.epochs[seen - 1]
            if not self._advance(timeout_s=None):
                return

    def _repr_html_(self) -> str:
        return run_html(self.run_dir)

    def poll(self) -> list[EpochMetrics]:
        """The epochs that ended since the last poll, without waiting."""
        while self._advance(timeout_s=0.0) and self._has_more():
            pass
        self._talk.pause()
        fresh = self.epochs[self._num_polled :]
        self._num_polled = len(self.epochs)
        return fresh

    def join(self) -> Trained:
        """Wait for the end of the run; raises the error of a failed rank."""
        for _ in self:
            pass
        return Trained(
            epochs=tuple(self.epochs), run_dir=self.run_dir, model_file=self._model_file or self._folder.model_file
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    @abc.abstractmethod
    def is_running(self) -> bool: ...

    @abc.abstractmethod
    def stop(self) -> None:
        """Ask the run to stop at the next average, within a few windows; all training so far is kept."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the run at once; no process is left running."""

    @abc.abstractmethod
    def _advance(self, timeout_s: float | None) -> bool:
        """Wait for a message; false if the run has ended or the time is up."""

    def _has_more(self) -> bool:
        return True


class StartedRun(Run):
    """A run whose ranks this program started."""

    def __init__(
        self,
        ranks: Ranks,
        folder: RunFolder,
        *,
        on_message: Callable[[Message], None],
        talk: RunTalk | None = None,
        sampler: Sampler | None = None,
        page: WatchChild | None = None,
        grace_s: float = DEFAULT_GRACE_S,
    ) -> None:
        super().__init__(folder, talk or RunTalk())
        self.ranks = ranks
        self._sampler = sampler
        self._page = page
        self._is_concluded = False
        self._on_message = on_message
        self._record_before = folder.read_json("record.json")
        self._is_closed = False
        self._is_waiting = False
        self._grace_s = grace_s
        self._starter_pid = os.getpid()
        # SIGTERM would end this program at once, so it is always caught. Ctrl-C is caught during a wait only.
        self._sigterm = self._make_guard(signal.SIGTERM).open()
        atexit.register(self._end_at_exit)
        # The ranks are starting meanwhile.
        prepare_timeline()
        if sampler is not None:
            sampler.begin()

    @property
    def is_running(self) -> bool:
        return self.ranks.is_running

    def stop(self) -> None:
        self.ranks.stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt) and self.is_running:
            self._interrupt(signal.SIGINT)
        self.close()

    def close(self) -> None:
        if self.ranks.interrupted_by is not None:
            self._await_interrupted()
        if self.is_running:
            self._cut_short(status="closed")

    def _cut_short(self, *, status: str) -> None:
        self.ranks.close()
        atexit.unregister(self._end_at_exit)
        self._sigterm.close()
        if not self._has_recorded_end():
            self._is_closed = True
            close_record(self._folder, status=status)
            complete_timeline(self.run_dir, self._sampler)
        self._close_page()

    def _close_page(self) -> None:
        """Close the live page; called after the record is written, because the page shows how the run ended."""
        page, self._page = self._page, None
        if page is not None:
            page.close()

    # A signal

    def _make_guard(self, number: signal.Signals) -> SignalGuard:
        return SignalGuard(self._on_signal, on_repeat=self._on_repeat, numbers=[number])

    def receive(self, number: signal.Signals) -> None:
        """React to a signal that arrived before this handle existed."""
        if self.ranks.interrupted_by is None:
            self._on_signal(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.is_running:
            self._interrupt(number)
        if not self._is_waiting:
            raise ending(number)

    def _on_repeat(self, number: signal.Signals) -> None:
        self.ranks.end_at_once()
        raise ending(number)

    def _interrupt(self, number: signal.Signals) -> None:
        self.ranks.interrupt(number)
        self._talk.is_stopping = True
        say_stopping(number, within_s=self._grace_s)

    def _await_interrupted(self) -> None:
        """Ask the ranks to stop in an orderly way; kill them after the grace period, or at once on a second signal."""
        try:
            self.ranks.wait()
        except (KeyboardInterrupt, SystemExit):
            self._cut_short(status="interrupted")
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            self._conclude()

    def _conclude_interrupted(self, number: signal.Signals) -> None:
        """After ranks ended because of a signal: update the record, print what was saved, and exit the program."""
        if not self._has_recorded_end():
            close_record(self._folder, status="interrupted")
        if not self._is_concluded:
            self._is_concluded = True
            complete_timeline(self.run_dir, self._sampler)
            say_interrupted(self.run_dir)
        raise ending(number)

    def _has_recorded_end(self) -> bool:
        """Whether the ranks wrote their final record; a record of an earlier run does not count."""
        record = self._folder.read_json("record.json")
        return record is not None and record != self._record_before and record["status"] in ENDED

    def _end_at_exit(self) -> None:
        # A fork of the starter also runs this at exit, and must not end the ranks.
        if os.getpid() != self._starter_pid:
            return
        is_interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
        if is_interrupted and self.is_running and self.ranks.interrupted_by is None:
            self._interrupt(signal.SIGINT)
        if self.is_running and self.ranks.interrupted_by is None:
            self.close()
            print(_ENDED_AT_EXIT.format(folder=self.run_dir), file=sys.stderr)
            return
        try:
            self._await_interrupted()
        except OutriderError as error:
            print(_FAILED_UNSEEN.format(folder=self.run_dir, error=error), file=sys.stderr)

    def _conclude(self) -> None:
        """After all ranks have ended: record the failure, if any, and raise it."""
        try:
            self._record_end()
        finally:
            self._close_page()

    def _record_end(self) -> None:
        self.ranks.wait()
        self._talk.pause()
        atexit.unregister(self._end_at_exit)
        self._sigterm.close()
        if self._sampler is not None:
            self._sampler.end()
        try:
            self.ranks.raise_error()
        except OutriderError as error:
            close_record(self._folder, status="failed", error=error)
            complete_timeline(self.run_dir, self._sampler)
            raise
        if self.ranks.interrupted_by is not None:
            self._conclude_interrupted(self.ranks.interrupted_by)
        if self._is_closed:
            raise _closed_error()
        if not self._is_concluded:
            self._is_concluded = True
            complete_timeline(self.run_dir, self._sampler)
            self._talk.end(self.run_dir)

    def _advance(self, timeout_s: float | None) -> bool:
        try:
            message = self._next_message(timeout_s)
        except (KeyboardInterrupt, SystemExit):
            self._cut_short(status="interrupted")
            raise
        if message is None and (timeout_s is None or not self.ranks.is_running):
            self._conclude()
        if message is None:
            return False
        if message.kind == "epoch":
            self.epochs.append(from_json(message.fields))
        elif message.kind == "model":
            self._model_file = Path(message.fields["path"])
        elif message.kind == "warning":
            self._talk.pause()
            print(f"outrider: {message.fields['text']}", file=sys.stderr)
        self._talk.saw(message)
        self._on_message(message)
        return True

    def _next_message(self, timeout_s: float | None) -> Message | None:
        """Wait for a message; a signal during the wait stops the run in an orderly way and is then raised."""
        self._is_waiting = True
        try:
            with self._make_guard(signal.SIGINT):
                message = self.ranks.next_message(timeout_s)
                if message is None and timeout_s is None:
                    self.ranks.wait()
                return message
        finally:
            self._is_waiting = False


class AdoptedRun(Run):
    """A run in which this process is a rank: it trains while the caller iterates or joins."""

    def __init__(self, training: Generator[EpochMetrics], link: Link, folder: RunFolder, *, talk: RunTalk) -> None:
        super().__init__(folder, talk)
        self._training = training
        self._link = link
        self._has_ended = False
        self._error: OutriderError | None = None
        # The guards refer to the link and not to this handle, so that a handle without references ends its run.
        self._sigterm = SignalGuard(partial(_ask_to_stop, link), numbers=[signal.SIGTERM])
        self._sigint = SignalGuard(partial(_ask_to_stop, link), numbers=[signal.SIGINT])
        weakref.finalize(self, self._sigterm.close)

    @property
    def is_running(self) -> bool:
        return not self._has_ended

    def stop(self) -> None:
        self._link.stop_requested.set()

    def close(self) -> None:
        self._sigterm.close()
        if not self._has_ended:
            self._has_ended = True
            self._error = _closed_error()
            self._training.close()

    def _advance(self, timeout_s: float | None) -> bool:
        if self._error is not None:
            raise self._error
        if self._has_ended:
            return False
        self._sigterm.open()
        try:
            with self._sigint:
                self.epochs.append(next(self._training))
        except StopIteration:
            self._model_file = self._link.model_file
            self._end()
            return False
        except OutriderError as error:
            self._has_ended, self._error = True, error
            raise
        except BaseException:
            self._has_ended, self._error = True, _closed_error()
            raise
        finally:
            self._talk.pause()
            if self._has_ended:
                self._sigterm.close()
        return True

    def _end(self) -> None:
        """After training has ended: if a signal stopped it, let the signal end the program now."""
        self._has_ended = True
        number = self._link.interrupted_by
        if number is not None:
            if self._link.rank == 0:
                say_interrupted(self.run_dir)
            raise ending(number)

    def _has_more(self) -> bool:
        # Training happens inside poll(), so one call trains one epoch and returns.
        return False


def _ask_to_stop(link: Link, number: signal.Signals) -> None:
    link.interrupt(number)
    if link.rank == 0:
        say_stopping(number)


def _closed_error() -> OutriderError:
    return OutriderError(
        "the run was closed before it was done", hint="call join() first, or stop() to end it early and keep the model"
    )
