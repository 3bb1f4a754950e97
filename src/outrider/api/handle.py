"""The handle of a run: epochs as they end, the trained state, and a way to stop.

Decides how a program waits for its run; the ranks are watched by `runtime.ranks`, or are this very process.
"""

from __future__ import annotations

import abc
import atexit
import os
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

from outrider.errors import DataError, OutriderError
from outrider.runtime.folder import RunFolder, load_into, load_model
from outrider.runtime.messages import Link, Message
from outrider.runtime.metrics import EpochMetrics, from_json
from outrider.runtime.ranks import Ranks
from outrider.runtime.record import close_record
from outrider.timeline.exports import complete_run
from outrider.timeline.sampler import Sampler

Model = TypeVar("Model", bound=nn.Module)

_ENDED_AT_EXIT = """\
outrider: the program ended before its run, so the run was ended too; what it left is in {folder}
hint: call join() on the handle to wait for the run, or stop() and join() to end it early and keep the model"""
_FAILED_UNSEEN = """\
outrider: the run in {folder} failed, and the program did not look: {error}
hint: call join() on the handle, which raises what made a run fail"""
_NO_TIMELINE = "outrider: the run in {folder} is complete, its timeline is not: {error}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a run that ended gives: its epochs and, in its folder, the model and the records."""

    epochs: tuple[EpochMetrics, ...]
    run_dir: Path

    @property
    def state_dict(self) -> dict[str, torch.Tensor]:
        return load_model(self.run_dir / "model.safetensors")

    def load_into(self, model: Model) -> Model:
        """Load the trained parameters and buffers into a model of the same architecture, and return it."""
        load_into(model, self.run_dir / "model.safetensors")
        return model


class Run(abc.ABC):
    """A run under way: iterate over its epochs, `poll()`, `stop()` or `join()` it."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.epochs: list[EpochMetrics] = []
        """The epochs that ended and were seen so far."""
        self._num_polled = 0

    @property
    def run_dir(self) -> Path:
        """What the run leaves behind; under torchrun rank 0's folder, once the ranks have met."""
        return self._folder.path

    def __iter__(self) -> Iterator[EpochMetrics]:
        """Each epoch as it ends, from the first; raises what made a rank fail."""
        seen = 0
        while True:
            while seen < len(self.epochs):
                seen += 1
                yield self.epochs[seen - 1]
            if not self._advance(timeout_s=None):
                return

    def poll(self) -> list[EpochMetrics]:
        """The epochs that ended since the last poll, without waiting."""
        while self._advance(timeout_s=0.0) and self._has_more():
            pass
        fresh = self.epochs[self._num_polled :]
        self._num_polled = len(self.epochs)
        return fresh

    def join(self) -> Trained:
        """Wait for the end of the run; raises what made a rank fail."""
        for _ in self:
            pass
        return Trained(epochs=tuple(self.epochs), run_dir=self.run_dir)

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
        """Ask the run to end once the batches at hand are done, a few windows at most; what was learned is kept."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the run at once; nothing of it is left running."""

    @abc.abstractmethod
    def _advance(self, timeout_s: float | None) -> bool:
        """Wait for news; false when there will be none, or none came in time."""

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
        sampler: Sampler | None = None,
    ) -> None:
        super().__init__(folder)
        self.ranks = ranks
        self._sampler = sampler
        self._is_concluded = False
        self._on_message = on_message
        self._record_before = folder.read_json("record.json")
        self._is_closed = False
        self._starter_pid = os.getpid()
        atexit.register(self._end_at_exit)
        if sampler is not None:
            sampler.begin()

    @property
    def is_running(self) -> bool:
        return self.ranks.is_running

    def stop(self) -> None:
        self.ranks.stop()

    def close(self) -> None:
        if self.is_running:
            self._cut_short()

    def _cut_short(self) -> None:
        self.ranks.close()
        atexit.unregister(self._end_at_exit)
        if not self._has_recorded_end():
            self._is_closed = True
            close_record(self._folder, status="closed")

    def _has_recorded_end(self) -> bool:
        """Whether the ranks got as far as their last record; one that was there before is not theirs."""
        record = self._folder.read_json("record.json")
        return record is not None and record != self._record_before and record["status"] in ("finished", "stopped")

    def _end_at_exit(self) -> None:
        # A fork of the starter runs this at its exit too, and must leave the ranks alone.
        if os.getpid() != self._starter_pid:
            return
        if self.is_running:
            self.close()
            print(_ENDED_AT_EXIT.format(folder=self.run_dir), file=sys.stderr)
            return
        try:
            self._conclude()
        except OutriderError as error:
            print(_FAILED_UNSEEN.format(folder=self.run_dir, error=error), file=sys.stderr)

    def _conclude(self) -> None:
        """Once all ranks have ended: raise what made them fail, and have the record say so."""
        self.ranks.wait()
        atexit.unregister(self._end_at_exit)
        if self._sampler is not None:
            self._sampler.end()
        try:
            self.ranks.raise_error()
        except OutriderError as error:
            close_record(self._folder, status="failed", error=error)
            raise
        if self._is_closed:
            raise _closed_error()
        if not self._is_concluded:
            self._is_concluded = True
            complete_timeline(self.run_dir, self._sampler)

    def _advance(self, timeout_s: float | None) -> bool:
        try:
            message = self.ranks.next_message(timeout_s)
            if message is None and (timeout_s is None or not self.ranks.is_running):
                self._conclude()
        except KeyboardInterrupt:
            self._cut_short()
            raise
        if message is None:
            return False
        if message.kind == "epoch":
            self.epochs.append(from_json(message.fields))
        self._on_message(message)
        return True


class AdoptedRun(Run):
    """A run in which this process is one of the ranks: it trains while somebody waits for it."""

    def __init__(self, training: Generator[EpochMetrics], link: Link, folder: RunFolder) -> None:
        super().__init__(folder)
        self._training = training
        self._link = link
        self._has_ended = False
        self._error: OutriderError | None = None

    @property
    def is_running(self) -> bool:
        return not self._has_ended

    def stop(self) -> None:
        self._link.stop_requested.set()

    def close(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._error = _closed_error()
            self._training.close()

    def _advance(self, timeout_s: float | None) -> bool:
        if self._error is not None:
            raise self._error
        if self._has_ended:
            return False
        try:
            self.epochs.append(next(self._training))
        except StopIteration:
            self._has_ended = True
            return False
        except OutriderError as error:
            self._has_ended, self._error = True, error
            raise
        except BaseException:
            self._has_ended, self._error = True, _closed_error()
            raise
        return True

    def _has_more(self) -> bool:
        # One epoch per poll: training happens here, and the caller has its own work to do.
        return False


def complete_timeline(folder: Path, sampler: Sampler | None = None) -> None:
    """What a run leaves behind besides its model and record; a disk that fills up now does not make the run fail."""
    try:
        complete_run(folder, sampler)
    except DataError as error:
        print(_NO_TIMELINE.format(folder=folder, error=error), file=sys.stderr)


def _closed_error() -> OutriderError:
    return OutriderError(
        "the run was closed before it was done", hint="call join() first, or stop() to end it early and keep the model"
    )
