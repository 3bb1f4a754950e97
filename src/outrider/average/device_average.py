"""Decides when the parts of an average run on the `nccl` backend: all on the device, on a separate stream.

Exchange does the arithmetic, and a Collective communicates. Called by the averages of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.average.averager import Averager
from outrider.average.checks import Verifier
from outrider.average.exchange import Exchange
from outrider.average.rank_facts import Settled
from outrider.average.transport.collective import Collective, await_event, overdue
from outrider.average.transport.packet_sums import PacketSums
from outrider.average.wire_piece import Piece
from outrider.errors import WaitError


class DeviceAverager(Averager):
    """Averages on a CUDA device; the host waits only for the few facts at the end of the wire.

    An average launches dozens of small kernels, which cost more host time than device time; in a background average the
    worker thread launches them. The collective needs its own communicator, because a sum waits for the other ranks and
    must not delay gradients.
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
        """`await_others` returns when all ranks have called it; the worker calls it on the host."""
        assert exchange.device.type == "cuda", f"device averages need device buffers, got {exchange.device}"
        assert exchange.device == exchange.arena.device, "arena and exchange must share a device"
        super().__init__(exchange, collective, verify=verify, timeout_s=timeout_s)
        self._await_others = await_others
        self._is_live = verify is None
        self._travelling: Tensor | None = None
        self._packets = PacketSums(collective, rank=exchange.rank, world_size=exchange.world_size)
        self._stream = torch.cuda.Stream(exchange.device)
        # Blocking events: the waiting worker sleeps instead of spinning on a core that computes.
        self._started, self._staged, self._packed, self._summed, self._done = (
            torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(5)
        )

    def _snapshot(self) -> None:
        """Take the snapshot on the compute stream, where the previous average was applied, so its buffers are free."""
        self._record_around(self.exchange.stage)

    def _record_around(self, stage: Callable[[], None]) -> None:
        compute = torch.cuda.current_stream(self.exchange.device)
        self._started.record(compute)
        stage()
        self._staged.record(compute)

    def average(self, samples: int, facts: Sequence[float]) -> Settled:
        """Average with all ranks and continue from the mean; blocks, and so needs no snapshot."""
        if not self._is_live:
            return super().average(samples, facts)
        assert self._pending is None, "an average is in flight: load or correct it before the next"
        self._num_begun += 1
        self._record_around(self.exchange.stage_live)
        settled = self._sum(samples, facts)
        self.exchange.load()
        return settled

    def _sum(self, samples: int, facts: Sequence[float]) -> Settled:
        self._enqueue_counters()
        self._enqueue_sum(samples, facts)
        await_event(self._done, self._collective, late=self._late, timeout_s=self._timeout_s)
        return self._read()

    def _sum_behind(self, samples: int, facts: Sequence[float]) -> Settled:
        """Start the sum when all ranks are ready.

        A kernel that waits for another rank occupies multiprocessors. In a slice of a GPU such a kernel was observed to
        block the steps of its own process.
        """
        self._enqueue_counters()
        self._packed.synchronize()
        self._await_others()
        self._enqueue_sum(samples, facts)
        # No timeout here: the thread that applies the result watches the timeout and the peers.
        self._done.synchronize()
        return self._read()

    def _enqueue_counters(self) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._staged)
            self.exchange.fetch()
            self._checks.snapshot_is_read(self.exchange)
            self._packed.record(self._stream)

    def _enqueue_sum(self, samples: int, facts: Sequence[float]) -> None:
        exchange = self.exchange
        with torch.cuda.stream(self._stream):
            exchange.open(samples, facts)
            for piece in exchange.pieces:
                summed = self._summed_piece(piece)
                self._checks.is_summed(exchange, [summed])
                exchange.take_facts(piece, [summed])
                exchange.settle(piece, [summed])
            self._collective.sum_([exchange.pack_norms()])
            self._collective.max_(exchange.maxima)
            exchange.report()
            self._summed.record(self._stream)
            self._checks.is_applied(exchange)
            self._checks.is_prepared(exchange)
            self._done.record(self._stream)

    def _summed_piece(self, piece: Piece) -> Tensor:
        buffer = self._buffer(piece)
        self.exchange.pack(piece, buffer)
        if piece.form is None:
            self._collective.sum_([buffer])
            return buffer
        total = torch.empty(piece.sum_numel, dtype=piece.sum_dtype, device=buffer.device)
        self._packets.sum_(buffer, piece.form, total)
        return total

    def _buffer(self, piece: Piece) -> Tensor:
        """One buffer for all pieces: the stream keeps their uses in order."""
        if self._travelling is None or self._travelling.numel() < piece.num_bytes:
            largest = max(one.num_bytes for one in self.exchange.pieces)
            self._travelling = torch.empty(largest, dtype=torch.uint8, device=self.exchange.device)
        return self._travelling[: piece.num_bytes].view(piece.dtype)

    def _read(self) -> Settled:
        """Check the result of a finished sum; a sum that lost a peer can finish too, with a wrong result."""
        self._collective.check_peers()
        return replace(
            self.exchange.read(),
            snapshot_ms=self._started.elapsed_time(self._staged),
            transfer_ms=self._packed.elapsed_time(self._summed),
            total_ms=self._started.elapsed_time(self._done),
        )

    def _late(self) -> WaitError:
        return overdue(self.exchange, number=self._num_begun, timeout_s=self._timeout_s)
