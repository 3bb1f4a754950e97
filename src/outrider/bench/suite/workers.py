"""Worker processes that run one case each and tell what becomes of it; none of them outlives whoever started it.

Decides how workers are started, heard and ended; which case is next is the sweep's business, how a case trains the
suite's. Used by `jobs`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Self

from outrider.bench.suite.case import Case
from outrider.bench.suite.run import Planned, keep_failure, run_case
from outrider.bench.suite.runs import SuiteRun
from outrider.errors import OutriderError
from outrider.runtime.messages import Message

Told = Message | SuiteRun | OutriderError
"""What a worker says: an epoch that ended, and last the run or the reason why there is none."""
_EXIT_INTERRUPTED = 130
_EXIT_S = 10.0
"""For a worker that has told its last."""
_END_S = 60.0
"""For a worker to end its ranks and close its record; after that it is killed, and its ranks end by themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Worker:
    planned: Planned
    folder: Path
    process: SpawnProcess
    connection: Connection


class Workers:
    """Those under way; leaving the `with` block ends them."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """`variables` are added to the environment of every worker, and so of its ranks."""
        self._variables = dict(variables)
        self._busy: dict[Connection, _Worker] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # By this a worker knows that it is to end; all of them first, so that they do it at the same time.
        for connection in self._busy:
            connection.close()
        deadline_s = time.monotonic() + _END_S
        try:
            for worker in self._busy.values():
                worker.process.join(max(0.0, deadline_s - time.monotonic()))
        finally:
            for worker in self._busy.values():
                _end(worker.process)

    @property
    def num_busy(self) -> int:
        return len(self._busy)

    def start(self, planned: Planned, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there, planned, folder, self._variables))
        with there, _interrupts_held():
            process.start()
        self._busy[here] = _Worker(planned=planned, folder=folder, process=process, connection=here)

    def hear(self) -> Iterator[tuple[Case, Told]]:
        """Wait until somebody tells something. A worker that has told its last is no longer busy."""
        for connection in wait(list(self._busy)):
            assert isinstance(connection, Connection)
            worker = self._busy[connection]
            told = _received(worker)
            if not isinstance(told, Message):
                del self._busy[connection]
                _dismiss(worker)
            yield worker.planned.case, told


def _received(worker: _Worker) -> Told:
    try:
        told: Told = worker.connection.recv()
    except (EOFError, OSError):
        told = _died(worker)
        keep_failure(worker.folder, worker.planned, told)
    return told


def _died(worker: _Worker) -> OutriderError:
    """Killed from outside, or by an error that is not ours and that it printed."""
    worker.process.join(_EXIT_S)
    return OutriderError(
        f"its process ended with exit code {worker.process.exitcode} before the run did",
        hint="what it printed is on stderr; a negative number is the signal that killed it",
    )


def _dismiss(worker: _Worker) -> None:
    """Let a worker that has told its last end by itself: closing its connection before would interrupt it."""
    worker.process.join(_EXIT_S)
    worker.connection.close()
    _end(worker.process)


def _end(process: SpawnProcess) -> None:
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """A process started meanwhile begins with Ctrl-C held: one that hit its imports would end in a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In the worker


def _work(connection: Connection, planned: Planned, folder: Path, variables: Mapping[str, str]) -> None:
    # Ctrl-C in the terminal must reach the starter alone, which ends its workers in order.
    os.setsid()
    os.environ.update(variables)
    try:
        threading.Thread(target=_end_with_starter, args=(connection,), daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        _tell(connection, _outcome(connection, planned, folder))
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)


def _end_with_starter(connection: Connection) -> None:
    """The starter says nothing: what comes is the end of the connection, by its will or with its life."""
    with suppress(EOFError, OSError):
        connection.recv()
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _outcome(connection: Connection, planned: Planned, folder: Path) -> Told:
    def tell_epochs(message: Message) -> None:
        if message.kind == "epoch":
            _tell(connection, message)

    try:
        return run_case(planned, folder, on_message=tell_epochs)
    except OutriderError as error:
        return error


def _tell(connection: Connection, told: Told) -> None:
    # Where nobody listens any more, the interrupt is on its way.
    with suppress(OSError):
        connection.send(told)
