"""Decides when the parts of an average run on the `nccl` backend: all on the device, on a stream of their own.

Does not do the arithmetic (Exchange) or the communication (Collective). Called by the rank driver.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch

from outrider.average.checks import Checks, Unchecked, Verifier
from outrider.average.collective import Collective, overdue
from outrider.average.exchange import Exchange
from outrider.average.facts import Settled


class DeviceAverager:
    """Averages on a CUDA device; the interface of HostAverager.

    `begin` enqueues the whole average and returns; the host only ever waits for the few facts at the end of the wire.
    The collective needs a communicator of its own: a sum waits for the other ranks and must not hold up gradients.
    """

    def __init__(
        self, exchange: Exchange, collective: Collective, *, verify: Verifier | None = None, timeout_s: float = 600.0
    ) -> None:
        assert exchange.device.type == "cuda", f"device averages need device buffers, got {exchange.device}"
        assert exchange.device == exchange.arena.device, "arena and exchange must share a device"
        self.exchange = exchange
        self._collective = collective
        self._checks: Checks = verify or Unchecked()
        self._timeout_s = timeout_s
        self._stream = torch.cuda.Stream(exchange.device)
        self._started, self._staged, self._packed, self._summed, self._done = (
            torch.cuda.Event(enable_timing=True) for _ in range(5)
        )
        self._is_pending = False
        self._num_begun = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def average(self, samples: int, facts: Sequence[float]) -> Settled:
        """Meet all ranks and go on from the mean."""
        self.begin(samples, facts)
        return self.load()

    def begin(self, samples: int, facts: Sequence[float]) -> None:
        """Take the snapshot in the order of the compute stream, and enqueue the rest beside it."""
        assert not self._is_pending, "an average is in flight: load or correct it before the next"
        self._num_begun += 1
        self._is_pending = True
        self._checks.begins(self.exchange)
        compute = torch.cuda.current_stream(self.exchange.device)
        self._started.record(compute)
        self.exchange.stage()
        self._staged.record(compute)
        with torch.cuda.stream(self._stream):
            # After the snapshot, and so after the average before was taken in: its buffers are free again.
            self._stream.wait_event(self._staged)
            self._enqueue(samples, facts)

    def is_ready(self) -> bool:
        """Whether load or correct would not wait."""
        return self._is_pending and self._done.query()

    def load(self) -> Settled:
        """Wait for the average and take its mean; only where no step was taken since begin."""
        settled = self._collect()
        self.exchange.load()
        self._checks.is_loaded(self.exchange)
        return settled

    def correct(self) -> Settled:
        """Wait for the average and move by it; every step taken since begin stays in."""
        settled = self._collect()
        self.exchange.add_correction()
        self._checks.is_corrected(self.exchange)
        return settled

    def close(self) -> None:
        """Forget an average that was never taken in; the stream ends with the averager."""
        self._is_pending = False

    def _enqueue(self, samples: int, facts: Sequence[float]) -> None:
        self.exchange.fetch()
        self._checks.snapshot_is_read(self.exchange)
        self.exchange.pack(samples, facts)
        self._packed.record(self._stream)
        self._collective.sum_(self.exchange.wires)
        self._collective.max_(self.exchange.maxima)
        self._summed.record(self._stream)
        self._checks.is_summed(self.exchange)
        self.exchange.apply()
        self._checks.is_applied(self.exchange)
        self.exchange.prepare_correction()
        self._checks.is_prepared(self.exchange)
        self._done.record(self._stream)

    def _collect(self) -> Settled:
        assert self._is_pending, "no average was begun"
        self._wait()
        self._is_pending = False
        torch.cuda.current_stream(self.exchange.device).wait_event(self._done)
        return replace(
            self.exchange.read(),
            snapshot_ms=self._started.elapsed_time(self._staged),
            transfer_ms=self._packed.elapsed_time(self._summed),
            total_ms=self._started.elapsed_time(self._done),
        )

    def _wait(self) -> None:
        """Ask again and again: torch has no timeout for events, and a peer that is gone never completes one."""
        deadline_s = time.monotonic() + self._timeout_s
        while not self._done.query():
            if time.monotonic() > deadline_s:
                raise overdue(self.exchange, number=self._num_begun, timeout_s=self._timeout_s)
            time.sleep(2e-5)
