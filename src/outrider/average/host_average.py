"""Decides when the parts of an average run on the `cpu` backend: snapshot now, sum in the background, apply later.

An average is a pipeline of pieces: the arena's device computes displacements, the host sums them, and the device
applies the mean, each on a different piece. The snapshot is taken on the main thread; the rest runs on the thread of
the average. Exchange does the arithmetic, and PieceSums communicates. Called by the averages of a rank.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from outrider.average.averager import Averager, BackgroundWorker
from outrider.average.checks import Checks, Verifier
from outrider.average.exchange import Exchange
from outrider.average.rank_facts import Settled
from outrider.average.transport.collective import Collective
from outrider.average.transport.piece_sums import PieceSums, SharedSums, piece_sums
from outrider.average.transport.pinned_memory import pinned
from outrider.average.wire_piece import Chunk, Piece

WORKER_THREADS = 4
"""Maximum number of summing threads of a rank on a GPU, whose cores are mostly free."""


@dataclass(kw_only=True, slots=True)
class WalkTimes:
    """The time spent in the parts of an average."""

    snapshot_ms: float = 0.0
    transfer_ms: float = 0.0

    def transferred(self, call: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        started_s = time.perf_counter()
        result = call()
        self.transfer_ms += _ms_since(started_s)
        return result


class PieceLane(Protocol):
    """Moves pieces between the arena's device and the sums."""

    def stage(self, stage: Callable[[], None], exchange: Exchange) -> None:
        """Take the snapshot; operations queued after this call may write to the arena again."""

    def wait_snapshot(self) -> float:
        """Wait until the host can read the counters of the snapshot; returns the duration in ms."""

    def context(self) -> AbstractContextManager[object]:
        """Context for all parts of an average after the snapshot."""

    def walk(self, exchange: Exchange, sums: PieceSums, checks: Checks, times: WalkTimes) -> None:
        """Sum all pieces and apply them; blocks until the common point is complete."""


class HostLane:
    """For an arena in host memory, or on a device without our own streams: does everything in turn on this thread."""

    def __init__(self) -> None:
        self._snapshot_ms = 0.0

    def stage(self, stage: Callable[[], None], exchange: Exchange) -> None:
        started_s = time.perf_counter()
        stage()
        exchange.fetch()
        self._snapshot_ms = _ms_since(started_s)

    def wait_snapshot(self) -> float:
        return self._snapshot_ms

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def walk(self, exchange: Exchange, sums: PieceSums, checks: Checks, times: WalkTimes) -> None:
        started: deque[Piece] = deque()

        def settle() -> None:
            segments = times.transferred(sums.finish)
            checks.is_summed(exchange, segments)
            exchange.take_facts(started[0], segments)
            exchange.settle(started.popleft(), segments)

        for piece in exchange.pieces:
            exchange.pack(piece, sums.place(piece.numel, piece.dtype, piece.form))
            sums.start()
            started.append(piece)
            if len(started) > sums.depth:
                settle()
        while started:
            settle()


class CudaLane:
    """Arena on a CUDA device, sums in pinned host memory.

    The compute stream copies the arena on the device, so the next step can write parameters without waiting. Two more
    streams carry displacements to the host and sums back, so that both directions of the bus are busy at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._started = torch.cuda.Event(enable_timing=True)
        self._staged = torch.cuda.Event()
        # Blocking events: the waiting thread sleeps instead of spinning on a core that computes.
        self._fetched = torch.cuda.Event(enable_timing=True, blocking=True)
        self._done = torch.cuda.Event(blocking=True)
        self._buffers: list[Tensor] = []

    def stage(self, stage: Callable[[], None], exchange: Exchange) -> None:
        compute = torch.cuda.current_stream(self._device)
        self._started.record(compute)
        # The snapshot's buffer is free, because the previous average was applied earlier on this stream.
        stage()
        self._staged.record(compute)
        with torch.cuda.stream(self._out):
            self._out.wait_event(self._staged)
            exchange.fetch()
            self._fetched.record(self._out)

    def wait_snapshot(self) -> float:
        self._fetched.synchronize()
        return float(self._started.elapsed_time(self._fetched))

    def context(self) -> AbstractContextManager[object]:
        # Never use the compute stream, where steps are queued.
        return torch.cuda.stream(self._out)

    def walk(self, exchange: Exchange, sums: PieceSums, checks: Checks, times: WalkTimes) -> None:
        self._back.wait_stream(self._out)
        outgoing: deque[tuple[Chunk, Piece, torch.cuda.Event]] = deque()
        summing: deque[tuple[Chunk, Piece]] = deque()
        returned: deque[torch.cuda.Event] = deque()

        def start() -> None:
            chunk, piece, event = outgoing.popleft()
            event.synchronize()
            # Later pieces may overwrite a sum, so copies that read it must be complete.
            while len(returned) > 1:
                returned.popleft().synchronize()
            sums.start()
            summing.append((chunk, piece))

        def settle() -> None:
            segments = times.transferred(sums.finish)
            checks.is_summed(exchange, segments)
            returned.append(self._settle(exchange, *summing.popleft(), segments))

        for number, chunk in enumerate(exchange.chunks):
            packed = self._pack(exchange, chunk, number % 2)
            for piece, at in chunk.places():
                outgoing.append((chunk, piece, self._send(packed[at : at + piece.numel], piece, sums)))
                if len(outgoing) > min(1, sums.depth):
                    start()
                if len(outgoing) + len(summing) > sums.depth:
                    settle()
        while outgoing or summing:
            if outgoing:
                start()
            settle()
        with torch.cuda.stream(self._back):
            self._done.record(self._back)
        self._done.synchronize()

    def _pack(self, exchange: Exchange, chunk: Chunk, turn: int) -> Tensor:
        with torch.cuda.stream(self._out):
            buffer = self._buffer(turn, chunk.whole.num_bytes).view(chunk.whole.dtype)
            exchange.pack(chunk.whole, buffer)
        return buffer

    def _send(self, packed: Tensor, piece: Piece, sums: PieceSums) -> torch.cuda.Event:
        place = sums.place(piece.numel, piece.dtype, piece.form)
        with torch.cuda.stream(self._out):
            place.copy_(packed, non_blocking=True)
            sent = torch.cuda.Event(blocking=True)
            sent.record(self._out)
        return sent

    def _settle(self, exchange: Exchange, chunk: Chunk, piece: Piece, segments: Sequence[Tensor]) -> torch.cuda.Event:
        """Copy the sum of a piece to the device; the last piece of a chunk moves the common point."""
        exchange.take_facts(piece, segments)
        with torch.cuda.stream(self._back):
            whole = chunk.whole
            buffer = self._buffer(2, whole.sum_bytes).view(whole.sum_dtype)
            at = piece.span.start - whole.span.start
            for segment in segments:
                buffer[at : at + segment.numel()].copy_(segment, non_blocking=True)
                at += segment.numel()
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(self._back)
            if piece is chunk.pieces[-1]:
                exchange.settle(whole, [buffer])
        return arrived

    def _buffer(self, turn: int, num_bytes: int) -> Tensor:
        """One of three buffers on the device; each is used on one stream only, which keeps its uses in order."""
        while len(self._buffers) <= turn:
            self._buffers.append(torch.empty(0, dtype=torch.uint8, device=self._device))
        if self._buffers[turn].numel() < num_bytes:
            self._buffers[turn] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffers[turn][:num_bytes]


def lane_for(device: torch.device) -> PieceLane:
    return CudaLane(device) if device.type == "cuda" else HostLane()


class HostAverager(Averager):
    """Averages that are summed in host memory."""

    def __init__(
        self, exchange: Exchange, collective: Collective, *, verify: Verifier | None = None, timeout_s: float = 600.0
    ) -> None:
        assert exchange.device.type == "cpu", f"host averages need host sums, got {exchange.device}"
        super().__init__(exchange, collective, verify=verify, timeout_s=timeout_s)
        self._is_live = exchange.can_be_live and verify is None
        self._on_gpu = exchange.arena.device.type == "cuda"
        self._lane = lane_for(exchange.arena.device)
        self._sums: PieceSums | None = None
        self._largest_bytes = 0
        self._pins = ExitStack()
        if self._on_gpu:
            num_threads = min(WORKER_THREADS, torch.get_num_threads())
            self._worker = BackgroundWorker(f"averager of rank {exchange.rank}", num_threads=num_threads)

    def average(self, samples: int, facts: Sequence[float]) -> Settled:
        """Average with all ranks and continue from the mean; blocks, and so needs no snapshot."""
        if not self._is_live:
            return super().average(samples, facts)
        self._open_live()
        settled = self._sum(samples, facts)
        self.exchange.load()
        return settled

    def _open_live(self) -> None:
        assert self._pending is None, "an average is in flight: load or correct it before the next"
        self._num_begun += 1
        self._lane.stage(self.exchange.stage_live, self.exchange)

    def _snapshot(self) -> None:
        self._lane.stage(self.exchange.stage, self.exchange)

    def _sum_behind(self, samples: int, facts: Sequence[float]) -> Settled:
        started_busy_s = time.thread_time()
        settled = self._sum(samples, facts)
        self._checks.is_prepared(self.exchange)
        busy_ms = 0.0 if self._on_gpu else (time.thread_time() - started_busy_s) * 1e3
        return replace(settled, busy_ms=busy_ms)

    def _sum(self, samples: int, facts: Sequence[float]) -> Settled:
        times = WalkTimes(snapshot_ms=self._lane.wait_snapshot())
        started_s = time.perf_counter()
        exchange = self.exchange
        with self._lane.context():
            self._checks.snapshot_is_read(exchange)
            exchange.open(samples, facts)
            self._lane.walk(exchange, self._piece_sums(), self._checks, times)
            ended_s = time.perf_counter()
            self._collective.sum_([exchange.pack_norms()])
            self._collective.max_(exchange.maxima)
            exchange.report()
            times.transfer_ms += _ms_since(ended_s)
            self._checks.is_applied(exchange)
        return replace(
            exchange.read(),
            snapshot_ms=times.snapshot_ms,
            transfer_ms=times.transfer_ms,
            total_ms=times.snapshot_ms + _ms_since(started_s),
        )

    def close(self, *, timeout_s: float = 2.0) -> None:
        super().close(timeout_s=timeout_s)
        self._pins.close()

    def _piece_sums(self) -> PieceSums:
        """The sums of pieces; created anew when optimizer state joins the average, which changes the pieces."""
        largest = max(max(piece.num_bytes, piece.sum_bytes) for piece in self.exchange.pieces)
        if self._sums is None or self._largest_bytes != largest:
            self._sums = piece_sums(
                self._collective,
                rank=self.exchange.rank,
                world_size=self.exchange.world_size,
                largest_bytes=largest,
                pin_memory=self._on_gpu,
            )
            self._largest_bytes = largest
            self._pins.close()
            if self._on_gpu and isinstance(self._sums, SharedSums):
                self._pins.enter_context(pinned(self._sums.memories))
        return self._sums


def _ms_since(started_s: float) -> float:
    return (time.perf_counter() - started_s) * 1e3
