"""Worker processes that run cases and report their results; no worker outlives its starter.

Decides how workers are started, polled and ended. The sweep decides which case is next, and `run_case` trains.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
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
from typing import Self

from outrider.bench.suite.run_case import Planned, keep_failure, run_case
from outrider.bench.suite.runs import Case, SuiteRun
from outrider.errors import OutriderError
from outrider.world.messages import Message

Told = Message | SuiteRun | OutriderError
"""A message of a worker: a finished epoch, or at the end the run or the reason of its failure."""
_EXIT_INTERRUPTED = 130
_EXIT_S = 10.0
"""For a worker that said nothing more to be gone."""
_END_S = 60.0
"""For a worker to end its ranks and close its record; after that it is killed, and its ranks end by themselves."""


Job = tuple[Planned, Path]
"""A case and the folder of its run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Worker:
    process: SpawnProcess
    connection: Connection


class Workers:
    """As many as were ever busy at the same time; leaving the `with` block ends them.

    A worker is used again: it has imported all that a case needs, and so has its forkserver of ranks.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        """`variables` are added to the environment of every worker, and so of its ranks."""
        self._variables = dict(variables)
        self._busy: dict[_Worker, Job] = {}
        self._idle: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        workers = (*self._busy, *self._idle)
        # By this a worker knows that it is to end; all of them first, so that they do it at the same time.
        for worker in workers:
            worker.connection.close()
        deadline_s = time.monotonic() + _END_S
        try:
            for worker in workers:
                worker.process.join(max(0.0, deadline_s - time.monotonic()))
        finally:
            for worker in workers:
                _end(worker.process)

    @property
    def num_busy(self) -> int:
        return len(self._busy)

    def start(self, planned: Planned, folder: Path) -> None:
        worker = self._idle.pop() if self._idle else self._new()
        self._busy[worker] = (planned, folder)
        # Where it is gone, that is heard of.
        with suppress(OSError):
            worker.connection.send((planned, folder))

    def hear(self) -> Iterator[tuple[Case, Told]]:
        """Wait for a message of any worker. A worker that has reported the end of its case is no longer busy."""
        ready = wait([worker.connection for worker in self._busy])
        for worker in [worker for worker in self._busy if worker.connection in ready]:
            planned, folder = self._busy[worker]
            try:
                told: Told = worker.connection.recv()
            except (EOFError, OSError):
                told = _died(worker)
                keep_failure(folder, planned, told)
                del self._busy[worker]
                _bury(worker)
            else:
                if not isinstance(told, Message):
                    del self._busy[worker]
                    self._idle.append(worker)
            yield planned.case, told

    def _new(self) -> _Worker:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there, self._variables))
        with there, _interrupts_held():
            process.start()
        return _Worker(process=process, connection=here)


def _died(worker: _Worker) -> OutriderError:
    """Killed from outside, or by an error that is not ours and that it printed."""
    worker.process.join(_EXIT_S)
    return OutriderError(
        f"its process ended with exit code {worker.process.exitcode} before the run did",
        hint="what it printed is on stderr; a negative number is the signal that killed it",
    )


def _bury(worker: _Worker) -> None:
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


def _work(connection: Connection, variables: Mapping[str, str]) -> None:
    # Ctrl-C in the terminal must reach the starter alone, which ends its workers in order.
    os.setsid()
    os.environ.update(variables)
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    try:
        threading.Thread(target=_listen, args=(connection, jobs), daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while True:
            _tell(connection, _outcome(connection, *jobs.get()))
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)


def _listen(connection: Connection, jobs: queue.SimpleQueue[Job]) -> None:
    """Take in jobs until the starter ends the connection, by its will or with its life."""
    try:
        with suppress(EOFError, OSError):
            while True:
                jobs.put(connection.recv())
    finally:
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
    # If the starter no longer listens, the interrupt is about to arrive.
    with suppress(OSError):
        connection.send(told)
