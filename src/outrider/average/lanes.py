"""Decides how a snapshot leaves the arena's device and how a correction gets there, off the compute path.

Does not average. Called by HostAverager: `snapshot` on the main thread, the rest on whichever thread does the average.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from outrider.average.exchange import Exchange


class Lane(Protocol):
    def snapshot(self, exchange: Exchange) -> None:
        """Begin; afterwards the arena may be written again by whatever is ordered after this call."""

    def wait_snapshot(self) -> float:
        """Wait until the snapshot can be read by the host; returns its ms."""

    def deliver(self, exchange: Exchange) -> None:
        """Bring the correction to the arena's device; done when this returns."""


class HostLane:
    """Arena and exchange in host memory, or on a device without streams of ours: plain copies."""

    def __init__(self) -> None:
        self._snapshot_ms = 0.0

    def snapshot(self, exchange: Exchange) -> None:
        started_s = time.perf_counter()
        exchange.snapshot()
        self._snapshot_ms = (time.perf_counter() - started_s) * 1e3

    def wait_snapshot(self) -> float:
        return self._snapshot_ms

    def deliver(self, exchange: Exchange) -> None:
        exchange.prepare_correction()


class CudaLane:
    """Arena on a CUDA device, exchange in pinned host memory.

    The arena is copied on the device in the order of the compute stream, so the next step needs no wait before it
    writes parameters; that copy goes to the host on a stream of its own. The correction comes back on it too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._started = torch.cuda.Event(enable_timing=True)
        self._staged = torch.cuda.Event()
        # Blocking: the thread that waits sleeps, it does not spin on a core that computes.
        self._fetched = torch.cuda.Event(enable_timing=True, blocking=True)
        self._delivered = torch.cuda.Event(blocking=True)

    def snapshot(self, exchange: Exchange) -> None:
        compute = torch.cuda.current_stream(self._device)
        self._started.record(compute)
        # The bridge it writes is free: the average before was delivered and taken in earlier on this stream.
        exchange.stage()
        self._staged.record(compute)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._staged)
            exchange.fetch()
            self._fetched.record(self._stream)

    def wait_snapshot(self) -> float:
        self._fetched.synchronize()
        return float(self._started.elapsed_time(self._fetched))

    def deliver(self, exchange: Exchange) -> None:
        with torch.cuda.stream(self._stream):
            exchange.prepare_correction()
            self._delivered.record(self._stream)
        # In the background: the pinned buffer may be written again afterwards, and the compute stream need not wait.
        self._delivered.synchronize()


def lane_for(device: torch.device) -> Lane:
    return CudaLane(device) if device.type == "cuda" else HostLane()
