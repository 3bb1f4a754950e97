"""Decides when the parts of an average run on the `cpu` backend: snapshot now, sum in the background, take in later.

Does not do the arithmetic (Exchange) or the communication (Collective). Called by the rank driver.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from outrider.average.averager import Averager
from outrider.average.checks import Verifier
from outrider.average.collective import Collective
from outrider.average.exchange import Exchange
from outrider.average.facts import Settled
from outrider.average.lanes import lane_for


class HostAverager(Averager):
    """Averages in host memory."""

    def __init__(
        self, exchange: Exchange, collective: Collective, *, verify: Verifier | None = None, timeout_s: float = 600.0
    ) -> None:
        assert exchange.device.type == "cpu", f"host averages need host buffers, got {exchange.device}"
        super().__init__(exchange, collective, verify=verify, timeout_s=timeout_s)
        self._lane = lane_for(exchange.arena.device)

    def _snapshot(self) -> None:
        self._lane.snapshot(self.exchange)

    def _sum_behind(self, samples: int, facts: Sequence[float]) -> Settled:
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


def _ms_since(started_s: float) -> float:
    return (time.perf_counter() - started_s) * 1e3
