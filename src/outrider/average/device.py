"""Decides when the parts of an average run on the `nccl` backend: all on the device, on a stream of their own.

Does not do the arithmetic (Exchange) or the communication (Collective). Called by the rank driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from outrider.average.averager import Averager
from outrider.average.checks import Verifier
from outrider.average.collective import Collective, await_event, overdue
from outrider.average.exchange import Exchange
from outrider.average.facts import Settled
from outrider.errors import WaitError


class DeviceAverager(Averager):
    """Averages on a CUDA device; the host only ever waits for the few facts at the end of the wire.

    Starting an average takes dozens of small kernels, which cost the host more than the device: in the background
    that is the worker's time. The collective needs a communicator of its own: a sum waits for the other ranks and must
    not hold up gradients.
    """

    def __init__(
        self,
        exchange: Exchange,
        collective: Collective,
        *,
        await_others: Callable[[], object],
        verify: Verifier | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """`await_others` returns when all ranks have called it; it is called by the worker, on the host."""
        assert exchange.device.type == "cuda", f"device averages need device buffers, got {exchange.device}"
        assert exchange.device == exchange.arena.device, "arena and exchange must share a device"
        super().__init__(exchange, collective, verify=verify, timeout_s=timeout_s)
        self._await_others = await_others
        self._stream = torch.cuda.Stream(exchange.device)
        # Blocking: the worker that waits sleeps, it does not spin on a core that computes.
        self._started, self._staged, self._packed, self._summed, self._done = (
            torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(5)
        )

    def _snapshot(self) -> None:
        """In the order of the compute stream; and so after the average before was taken in: its buffers are free."""
        compute = torch.cuda.current_stream(self.exchange.device)
        self._started.record(compute)
        self.exchange.stage()
        self._staged.record(compute)

    def _sum(self, samples: int, facts: Sequence[float]) -> Settled:
        self._enqueue_pack(samples, facts)
        self._enqueue_sum()
        await_event(self._done, self._collective, late=self._late, timeout_s=self._timeout_s)
        return self._read()

    def _sum_behind(self, samples: int, facts: Sequence[float]) -> Settled:
        """The sum begins when all ranks are there.

        A kernel that waits for a rank holds multiprocessors meanwhile, and in a slice of a GPU it was seen to stop the
        steps of its own process.
        """
        self._enqueue_pack(samples, facts)
        self._packed.synchronize()
        self._await_others()
        self._enqueue_sum()
        # Whoever takes it in watches the clock and the peers.
        self._done.synchronize()
        return self._read()

    def _enqueue_pack(self, samples: int, facts: Sequence[float]) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._staged)
            self.exchange.fetch()
            self._checks.snapshot_is_read(self.exchange)
            self.exchange.pack(samples, facts)
            self._packed.record(self._stream)

    def _enqueue_sum(self) -> None:
        with torch.cuda.stream(self._stream):
            self._collective.sum_(self.exchange.wires)
            self._collective.max_(self.exchange.maxima)
            self._summed.record(self._stream)
            self._checks.is_summed(self.exchange)
            self.exchange.apply()
            self._checks.is_applied(self.exchange)
            self.exchange.prepare_correction()
            self._checks.is_prepared(self.exchange)
            self._done.record(self._stream)

    def _read(self) -> Settled:
        """Once done; a sum that lost a peer can end as well, without being one."""
        self._collective.check_peers()
        return replace(
            self.exchange.read(),
            snapshot_ms=self._started.elapsed_time(self._staged),
            transfer_ms=self._packed.elapsed_time(self._summed),
            total_ms=self._started.elapsed_time(self._done),
        )

    def _late(self) -> WaitError:
        return overdue(self.exchange, number=self._num_begun, timeout_s=self._timeout_s)
