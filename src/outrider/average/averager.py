"""Decides the phases of an average: take a snapshot, sum it now or in the background, apply the result on request.

Each averager has one background thread, started with its first job. HostAverager and DeviceAverager decide where the
arithmetic happens; the averages of a rank call them.
"""

from __future__ import annotations

import abc
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from types import TracebackType
from typing import Generic, Self, TypeVar

import torch

from outrider.average.checks import Checks, Unchecked, Verifier
from outrider.average.exchange import Exchange
from outrider.average.rank_facts import Settled
from outrider.average.transport.collective import Collective, overdue
from outrider.errors import WaitError

Result = TypeVar("Result")


class BackgroundWorker(Generic[Result]):
    """Runs jobs one after another in its own thread; `close` ends the thread."""

    def __init__(self, name: str, *, num_threads: int = 1) -> None:
        """`num_threads` limits the threads of torch operations: more would take cores from steps on the host."""
        self._name = name
        self._num_threads = num_threads
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Result], Future[Result]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        if self._thread is None:
            self._thread = self._start()
        future: Future[Result] = Future()
        self._jobs.put((job, future))
        return future

    def close(self, *, timeout_s: float) -> None:
        """End the thread after its current job."""
        if self._thread is None:
            return
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise WaitError(
                f"waited {timeout_s:g} s for {self._name} to end its last job",
                hint="abort the process group first where a rank is gone",
            )
        self._thread = None

    def _start(self) -> threading.Thread:
        is_set = threading.Event()
        num_threads = torch.get_num_threads()
        # A daemon, so that a job stuck in a collective cannot keep the process from ending.
        thread = threading.Thread(target=self._loop, args=(is_set,), name=self._name, daemon=True)
        thread.start()
        is_set.wait()
        # OpenMP keeps the number of threads per thread, but MKL applies the worker's to the whole process.
        torch.set_num_threads(num_threads)
        return thread

    def _loop(self, is_set: threading.Event) -> None:
        # The first call adopts the process-wide number. Otherwise that number would later override the second call.
        torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        is_set.set()
        while (task := self._jobs.get()) is not None:
            job, future = task
            try:
                future.set_result(job())
            except BaseException as error:  # raised in the thread that waits for the result
                future.set_exception(error)


_TURN_S = 0.05


class Averager(abc.ABC):
    """Averages with all ranks; a context manager that ends its thread on exit.

    Call either `average`, which blocks, or `begin` followed by `load` (if no step was taken since) or `correct`.
    """

    def __init__(
        self, exchange: Exchange, collective: Collective, *, verify: Verifier | None = None, timeout_s: float = 600.0
    ) -> None:
        self.exchange = exchange
        self._collective = collective
        self._checks: Checks = verify or Unchecked()
        self._timeout_s = timeout_s
        self._worker: BackgroundWorker[Settled] = BackgroundWorker(f"averager of rank {exchange.rank}")
        self._pending: Future[Settled] | None = None
        self._num_begun = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def average(self, samples: int, facts: Sequence[float]) -> Settled:
        """Average with all ranks and continue from the mean; blocks."""
        self._open()
        settled = self._sum(samples, facts)
        self._take_mean()
        return settled

    def begin(self, samples: int, facts: Sequence[float]) -> None:
        """Take the snapshot and run the rest of the average in the background."""
        self._open()
        facts = tuple(facts)
        self._pending = self._worker.submit(lambda: self._sum_behind(samples, facts))

    def is_ready(self) -> bool:
        """Whether load or correct would return without waiting."""
        return self._pending is not None and self._pending.done()

    def load(self) -> Settled:
        """Wait for the average and load its mean; call this only if no step was taken since `begin`."""
        settled = self._collect()
        self._take_mean()
        return settled

    def correct(self) -> Settled:
        """Wait for the average and apply its correction; steps taken since `begin` are kept."""
        settled = self._collect()
        self.exchange.add_correction()
        self._checks.is_corrected(self.exchange)
        return settled

    def close(self, *, timeout_s: float = 2.0) -> None:
        """End the thread; an average whose result was never applied is dropped."""
        self._worker.close(timeout_s=timeout_s)
        self._pending = None

    @abc.abstractmethod
    def _snapshot(self) -> None:
        """Start the snapshot; operations queued after this call may write to the arena again."""

    @abc.abstractmethod
    def _sum(self, samples: int, facts: Sequence[float]) -> Settled:
        """Compute the new common point from the snapshot, on the calling thread."""

    @abc.abstractmethod
    def _sum_behind(self, samples: int, facts: Sequence[float]) -> Settled:
        """Like `_sum`, on the worker's thread, including the correction."""

    def _open(self) -> None:
        assert self._pending is None, "an average is in flight: load or correct it before the next"
        self._num_begun += 1
        self._checks.begins(self.exchange)
        self._snapshot()

    def _collect(self) -> Settled:
        assert self._pending is not None, "no average was begun"
        started_s = time.monotonic()
        while not wait([self._pending], timeout=min(_TURN_S, self._timeout_s)).done:
            self._collective.check_peers()
            if time.monotonic() > started_s + self._timeout_s:
                raise overdue(self.exchange, number=self._num_begun, timeout_s=self._timeout_s)
        settled = self._pending.result()
        self._pending = None
        return replace(settled, waited_ms=(time.monotonic() - started_s) * 1e3)

    def _take_mean(self) -> None:
        self.exchange.load()
        self._checks.is_loaded(self.exchange)
