"""Decides where background work of an average runs: one thread per averager, started at its first job.

Does not know what a job does. Called by HostAverager.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

from outrider.errors import WaitError

Result = TypeVar("Result")


class Worker(Generic[Result]):
    """Runs jobs one after the other in its own thread, which `close` ends."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Result], Future[Result]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        if self._thread is None:
            self._thread = self._start()
        future: Future[Result] = Future()
        self._jobs.put((job, future))
        return future

    def close(self, *, timeout_s: float) -> None:
        """End the thread after the job it is at."""
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
        # OpenMP keeps the number per thread, but MKL takes the worker's for the whole process.
        torch.set_num_threads(num_threads)
        return thread

    def _loop(self, is_set: threading.Event) -> None:
        # One thread for the worker's own operations: a pool beside the compute pool would take its cores.
        # The first call adopts the process-wide number, which would otherwise undo the second later.
        torch.get_num_threads()
        torch.set_num_threads(1)
        is_set.set()
        while (task := self._jobs.get()) is not None:
            job, future = task
            try:
                future.set_result(job())
            except BaseException as error:  # handed to whoever waits for the result
                future.set_exception(error)
