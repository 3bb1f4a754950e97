"""Decides the life of an average: snapshot now, sum now or in the background, take in when asked.

Does not know where the arithmetic happens: HostAverager and DeviceAverager do. Called, through them, by the driver.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Self

from outrider.average.checks import Checks, Unchecked, Verifier
from outrider.average.collective import Collective, overdue
from outrider.average.exchange import Exchange
from outrider.average.facts import Settled
from outrider.average.worker import Worker

_TURN_S = 0.05


class Averager(abc.ABC):
    """A context manager whose thread ends with it.

    Either `average`, which blocks; or `begin`, then `load` where no step was taken since, `correct` where steps were.
    """

    def __init__(
        self, exchange: Exchange, collective: Collective, *, verify: Verifier | None = None, timeout_s: float = 600.0
    ) -> None:
        self.exchange = exchange
        self._collective = collective
        self._checks: Checks = verify or Unchecked()
        self._timeout_s = timeout_s
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
        self._pending = self._worker.submit(lambda: self._sum_behind(samples, facts))

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

    @abc.abstractmethod
    def _snapshot(self) -> None:
        """Begin; afterwards the arena may be written again by whatever is ordered after this call."""

    @abc.abstractmethod
    def _sum(self, samples: int, facts: Sequence[float]) -> Settled:
        """From the snapshot to the new common point, here and now."""

    @abc.abstractmethod
    def _sum_behind(self, samples: int, facts: Sequence[float]) -> Settled:
        """The same on the worker's thread, and the correction with it."""

    def _open(self) -> None:
        assert self._pending is None, "an average is in flight: load or correct it before the next"
        self._num_begun += 1
        self._checks.begins(self.exchange)
        self._snapshot()

    def _collect(self) -> Settled:
        assert self._pending is not None, "no average was begun"
        deadline_s = time.monotonic() + self._timeout_s
        while not wait([self._pending], timeout=min(_TURN_S, self._timeout_s)).done:
            self._collective.check_peers()
            if time.monotonic() > deadline_s:
                raise overdue(self.exchange, number=self._num_begun, timeout_s=self._timeout_s)
        settled = self._pending.result()
        self._pending = None
        return settled

    def _take_mean(self) -> None:
        self.exchange.load()
        self._checks.is_loaded(self.exchange)
