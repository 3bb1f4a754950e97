"""Batches of any map-style data set, read ahead by worker processes.

Decides what the workers do next: they read the announced batches in order, with the same sample reader as ItemFeed.
Chosen by make_feed if workers are requested.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from outrider.data.loading import Loading
from outrider.data.sample_reader import Collate, ReadRequest, SampleReader, name_samples, request_for, to_device
from outrider.errors import DataError, WaitError
from outrider.policy.effects import Batch

WAIT_LIMIT_S = 600.0
_CHECK_EVERY_S = 1.0


class WorkerFeed:
    """One DataLoader whose endless sampler yields the announced batches; its workers live until close()."""

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device,
        workers: int,
        seed: int,
        collate: Collate | None = None,
        reason: str = "",
        wait_limit_s: float = WAIT_LIMIT_S,
        loading: Loading | None = None,
    ) -> None:
        self.reason = reason
        self.num_samples = len(dataset)
        self._reader = SampleReader(dataset, seed=seed, collate=collate)
        self._device = device
        self._workers = workers
        self._loading = loading or Loading()
        self._wait_limit_s = self._loading.timeout_s or wait_limit_s
        self._results: Iterator[Any] | None = None
        self._order: Tensor | None = None
        self._epoch = 0
        self._announced: deque[Batch] = deque()
        # Mirrors the requests that the DataLoader gave to its workers, oldest first; None for unwanted results.
        self._in_flight: deque[Batch | None] = deque()

    def start_epoch(self, order: Tensor, epoch: int) -> None:
        self._order, self._epoch = order, epoch
        self._announced.clear()
        self._in_flight = deque([None] * len(self._in_flight))
        if self._results is None:
            self._results = self._start_workers()

    def announce(self, batches: Iterable[Batch]) -> None:
        self._announced.extend(batch for batch in batches if batch.count > 0)
        self._make_room()

    def fetch(self, batch: Batch) -> Any:
        request = self._request(batch)
        if not self._is_coming(batch):
            return to_device(self._reader.draw(request), self._device)
        drawn = self._receive(batch, request)
        if isinstance(drawn, DataError):
            raise drawn
        self._make_room()
        return to_device(drawn, self._device)

    def close(self) -> None:
        if self._results is not None:
            # Do not leave this to the garbage collector: a traceback may keep the iterator and its processes alive.
            self._results._shutdown_workers()  # type: ignore[attr-defined]
            self._results = None
        self._announced.clear()
        self._in_flight.clear()

    def _start_workers(self) -> Iterator[Any]:
        loading = self._loading
        # Use a separate generator: otherwise each start would draw a number from the rank's generator.
        generator = torch.Generator()
        if loading.seed is not None:
            generator.manual_seed(loading.seed)
        loader = DataLoader(
            _Drawn(self._reader),
            batch_size=None,  # the reader collates
            sampler=_Endless(self),
            num_workers=self._workers,
            collate_fn=_unchanged,
            pin_memory=self._device.type == "cuda",
            timeout=_CHECK_EVERY_S,
            generator=generator,
            worker_init_fn=loading.worker_init_fn,
            prefetch_factor=loading.prefetch_factor,
            multiprocessing_context=loading.multiprocessing_context,
        )
        with _child_signal_kept():
            return iter(loader)

    def _next_request(self) -> ReadRequest | None:
        """Called by the sampler when a worker is ready for a request."""
        batch = self._announced.popleft() if self._announced else None
        self._in_flight.append(batch)
        return None if batch is None else self._request(batch)

    def _request(self, batch: Batch) -> ReadRequest:
        assert self._order is not None, "fetch or announce before start_epoch"
        return request_for(batch, order=self._order, epoch=self._epoch)

    def _is_coming(self, batch: Batch) -> bool:
        if batch in self._in_flight:
            return True
        if batch not in self._announced:
            return False
        while self._announced[0] != batch:  # those before it were announced but passed over
            self._announced.popleft()
        return True

    def _receive(self, batch: Batch, request: ReadRequest) -> Any:
        while True:
            received_for = self._in_flight[0]
            drawn = self._next_result(request)
            if received_for == batch:
                return drawn

    def _make_room(self) -> None:
        """Replace idle requests at the head of the pipeline by announced batches, so that workers start them now."""
        while self._announced and self._in_flight and self._in_flight[0] is None:
            self._next_result(self._request(self._announced[0]))

    def _next_result(self, request: ReadRequest) -> Any:
        assert self._results is not None
        deadline_s = time.monotonic() + self._wait_limit_s
        while True:
            try:
                result = next(self._results)
                self._in_flight.popleft()
                return result
            except RuntimeError as error:
                if "timed out" not in str(error):
                    raise self._worker_lost(request) from error
                if time.monotonic() > deadline_s:
                    raise self._waited_too_long(request) from error

    def _worker_lost(self, request: ReadRequest) -> DataError:
        return DataError(
            f"a data worker (of {self._workers}) ended unexpectedly before {name_samples(request.indices)} came",
            hint="it crashed or ran out of memory; workers=0 reads the data in the rank and shows the error itself",
        )

    def _waited_too_long(self, request: ReadRequest) -> WaitError:
        return WaitError(
            f"waited {self._wait_limit_s:g} s for the data workers to read {name_samples(request.indices)}",
            hint="workers=0 reads the data in the rank and shows where it hangs",
        )


class _Endless(Sampler[ReadRequest | None]):
    """Yields the next announced batch, or None if there is none, because the DataLoader must never block here."""

    def __init__(self, feed: WorkerFeed) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[ReadRequest | None]:
        while True:
            yield self._feed._next_request()


class _Drawn(Dataset[Any]):
    """The data set of a worker: returns requested batches, and errors as values so that their messages survive."""

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader

    def __getitem__(self, request: ReadRequest | None) -> Any:
        if request is None:
            return None
        try:
            return self._reader.draw(request)
        except DataError as error:
            return error


def _unchanged(batch: Any) -> Any:
    return batch


@contextmanager
def _child_signal_kept() -> Iterator[None]:
    """Remove the SIGCHLD handler of torch's DataLoader, which would raise at an arbitrary point in the rank."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGCHLD, before)
