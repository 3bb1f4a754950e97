"""Decides when the parts of an average run on the `cpu` backend: snapshot now, sum in the background, take in later.

Does not do the arithmetic (Exchange) or the communication (Collective). Called by the rank driver.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Self

from outrider.average.checks import Checks, Unchecked, Verifier
from outrider.average.collective import Collective, overdue
from outrider.average.exchange import Exchange
from outrider.average.facts import Settled
from outrider.average.lanes import lane_for
from outrider.average.worker import Worker


class HostAverager:
    """Averages in host memory; a context manager whose thread ends with it.

    Either `average`, which blocks; or `begin`, then `load` where no step was taken since, `correct` where steps were.
    """

    def __init__(
        self, exchange: Exchange, collective: Collective, *, verify: Verifier | None = None, timeout_s: float = 600.0
    ) -> None:
        assert exchange.device.type == "cpu", f"host averages need host buffers, got {exchange.device}"
        self.exchange = exchange
        self._collective = collective
        self._checks: Checks = verify or Unchecked()
        self._timeout_s = timeout_s
        self._lane = lane_for(exchange.arena.device)
        self._worker: Worker[Settled] = Worker(f"averager of rank {exchange.rank}")
        self._pending: Future[Settled] | None = None
        self._num_begun = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def average(self, samples: int, facts: Sequence[float]) -> Settled:
        """Meet all ranks and go on from the mean."""
        self._open()
        settled = self._sum(samples, facts)
        self._take_mean()
        return settled

    def begin(self, samples: int, facts: Sequence[float]) -> None:
        """Take the snapshot; everything else happens in the background."""
        self._open()
        facts = tuple(facts)
        self._pending = self._worker.submit(lambda: self._sum_and_deliver(samples, facts))

    def is_ready(self) -> bool:
        """Whether load or correct would not wait."""
        return self._pending is not None and self._pending.done()

    def load(self) -> Settled:
        """Wait for the average and take its mean; only where no step was taken since begin."""
        settled = self._collect()
        self._take_mean()
        return settled

    def correct(self) -> Settled:
        """Wait for the average and move by it; every step taken since begin stays in."""
        settled = self._collect()
        self.exchange.add_correction()
        self._checks.is_corrected(self.exchange)
        return settled

    def close(self, *, timeout_s: float = 2.0) -> None:
        """End the thread; an average that was begun and never taken in is dropped."""
        self._worker.close(timeout_s=timeout_s)
        self._pending = None

    def _open(self) -> None:
        assert self._pending is None, "an average is in flight: load or correct it before the next"
        self._num_begun += 1
        self._checks.begins(self.exchange)
        self._lane.snapshot(self.exchange)

    def _sum_and_deliver(self, samples: int, facts: Sequence[float]) -> Settled:
        settled = self._sum(samples, facts)
        started_s = time.perf_counter()
        self._lane.deliver(self.exchange)
        self._checks.is_prepared(self.exchange)
        return replace(settled, total_ms=(settled.total_ms or 0.0) + _ms_since(started_s))

    def _sum(self, samples: int, facts: Sequence[float]) -> Settled:
        snapshot_ms = self._lane.wait_snapshot()
        started_s = time.perf_counter()
        self._checks.snapshot_is_read(self.exchange)
        self.exchange.pack(samples, facts)
        packed_s = time.perf_counter()
        self._collective.sum_(self.exchange.wires)
        self._collective.max_(self.exchange.maxima)
        transfer_ms = _ms_since(packed_s)
        self._checks.is_summed(self.exchange)
        settled = self.exchange.settle()
        self._checks.is_applied(self.exchange)
        total_ms = snapshot_ms + _ms_since(started_s)
        return replace(settled, snapshot_ms=snapshot_ms, transfer_ms=transfer_ms, total_ms=total_ms)

    def _collect(self) -> Settled:
        assert self._pending is not None, "no average was begun"
        pending = self._pending
        try:
            settled = pending.result(self._timeout_s)
        except TimeoutError:
            if pending.done():
                raise
            raise overdue(self.exchange, number=self._num_begun, timeout_s=self._timeout_s) from None
        self._pending = None
        return settled

    def _take_mean(self) -> None:
        self.exchange.load()
        self._checks.is_loaded(self.exchange)


def _ms_since(started_s: float) -> float:
    return (time.perf_counter() - started_s) * 1e3
