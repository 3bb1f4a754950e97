"""Batches of any map-style data set, read ahead by worker processes.

Decides what the workers do next: the announced batches, in order, and nothing while none is announced.
Samples are drawn as in ItemFeed, by the same drawer. Chosen by make_feed where workers are asked for.
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

from outrider.core.effects import Batch
from outrider.data.drawer import Collate, Drawer, Request, name_samples
from outrider.data.item_feed import request_for
from outrider.data.transfer import to_device
from outrider.errors import DataError, WaitError

WAIT_LIMIT_S = 600.0
_CHECK_EVERY_S = 1.0


class WorkerFeed:
    """One DataLoader whose endless sampler yields what was announced; its workers live until close()."""

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
    ) -> None:
        self.reason = reason
        self.num_samples = len(dataset)
        self._drawer = Drawer(dataset, seed=seed, collate=collate)
        self._device = device
        self._workers = workers
        self._wait_limit_s = wait_limit_s
        self._results: Iterator[Any] | None = None
        self._order: Tensor | None = None
        self._epoch = 0
        self._announced: deque[Batch] = deque()
        # Mirrors what the DataLoader has handed to its workers, oldest first; None where nobody wants the result.
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
            return to_device(self._drawer.draw(request), self._device)
        drawn = self._receive(batch, request)
        if isinstance(drawn, DataError):
            raise drawn
        self._make_room()
        return to_device(drawn, self._device)

    def close(self) -> None:
        if self._results is not None:
            # Not left to the garbage collector: a traceback may keep the iterator alive, and its processes with it.
            self._results._shutdown_workers()  # type: ignore[attr-defined]
            self._results = None
        self._announced.clear()
        self._in_flight.clear()

    def _start_workers(self) -> Iterator[Any]:
        loader = DataLoader(
            _Drawn(self._drawer),
            batch_size=None,  # the drawer collates
            sampler=_Endless(self),
            num_workers=self._workers,
            collate_fn=_unchanged,
            pin_memory=self._device.type == "cuda",
            timeout=_CHECK_EVERY_S,
            # Its own generator: otherwise each start takes a number from the rank's.
            generator=torch.Generator(),
        )
        with _child_signal_kept():
            return iter(loader)

    def _next_request(self) -> Request | None:
        """Called by the sampler whenever a worker can take something."""
        batch = self._announced.popleft() if self._announced else None
        self._in_flight.append(batch)
        return None if batch is None else self._request(batch)

    def _request(self, batch: Batch) -> Request:
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

    def _receive(self, batch: Batch, request: Request) -> Any:
        while True:
            received_for = self._in_flight[0]
            drawn = self._next_result(request)
            if received_for == batch:
                return drawn

    def _make_room(self) -> None:
        """Swap idle places at the head of the pipeline for announced batches, so that workers begin them now."""
        while self._announced and self._in_flight and self._in_flight[0] is None:
            self._next_result(self._request(self._announced[0]))

    def _next_result(self, request: Request) -> Any:
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

    def _worker_lost(self, request: Request) -> DataError:
        return DataError(
            f"a data worker (of {self._workers}) ended unexpectedly before {name_samples(request.indices)} came",
            hint="it crashed or ran out of memory; workers=0 reads the data in the rank and shows the error itself",
        )

    def _waited_too_long(self, request: Request) -> WaitError:
        return WaitError(
            f"waited {self._wait_limit_s:g} s for the data workers to read {name_samples(request.indices)}",
            hint="workers=0 reads the data in the rank and shows where it hangs",
        )


class _Endless(Sampler[Request | None]):
    """Yields the next announced batch, or None at once: a DataLoader that asks must never wait here."""

    def __init__(self, feed: WorkerFeed) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[Request | None]:
        while True:
            yield self._feed._next_request()


class _Drawn(Dataset[Any]):
    """What a worker sees as its data set: batches by request, errors as values so that they keep their words."""

    def __init__(self, drawer: Drawer) -> None:
        self._drawer = drawer

    def __getitem__(self, request: Request | None) -> Any:
        if request is None:
            return None
        try:
            return self._drawer.draw(request)
        except DataError as error:
            return error


def _unchanged(batch: Any) -> Any:
    return batch


@contextmanager
def _child_signal_kept() -> Iterator[None]:
    """Undo the SIGCHLD handler of torch's DataLoader, which would raise in the middle of whatever the rank is doing."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGCHLD, before)
