"""Samples how busy devices are while a run lasts: NVML for GPUs, psutil for the processes of CPU ranks.

Decides when and what is read; what low numbers mean is `idle`'s. One thread of the starter, begun and ended with the
run; a device or a driver that is not there is a normal case.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

PERIOD_S = 0.1

Gauge = Callable[[], float | None]
"""Per cent of what a device can give, since it was last read; None where that is not known."""
Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """A rank as the sampler sees it."""

    rank: int
    device: str
    pid: int
    num_threads: int


class Sampler:
    """`begin()` when the ranks run, `end()` when they are gone; it also ends by itself when `is_over` says so."""

    def __init__(self, workers: Iterable[Worker], *, origin_s: float, is_over: Callable[[], bool]) -> None:
        """`origin_s` is the wall-clock time of the run's start, as the recorders have it."""
        self._workers = tuple(workers)
        self._is_over = is_over
        self._offset_s = time.time() - origin_s - time.perf_counter()
        self._times_s: list[float] = []
        self._percents: dict[str, list[float | None]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outrider-sampler", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Take no further sample; nothing of the sampler is left running."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def utilization(self, events: Iterable[Event]) -> dict[str, Any]:
        """The samples as `timeline.json` has them; which GPU a rank had is known from its event `ready`."""
        gpus = {event["rank"]: event.get("gpu") for event in events if event["kind"] == "ready"}
        devices = [self._of_rank(worker, gpus.get(worker.rank)) for worker in self._workers]
        return {"period_ms": round(PERIOD_S * 1e3), "t": self._times_s, "devices": devices}

    def _of_rank(self, worker: Worker, gpu: str | None) -> dict[str, Any]:
        source = "psutil" if worker.device.startswith("cpu") else "nvml"
        percent = self._percents.get(_process_key(worker) if source == "psutil" else str(gpu))
        return {"rank": worker.rank, "device": worker.device, "source": source, "percent": percent}

    def _run(self) -> None:
        with ExitStack() as stack:
            gauges = self._open_gauges(stack)
            self._percents.update({name: [] for name in gauges})
            while not self._ended.wait(PERIOD_S) and not self._is_over():
                self._sample(gauges)

    def _sample(self, gauges: Mapping[str, Gauge]) -> None:
        self._times_s.append(round(time.perf_counter() + self._offset_s, 3))
        for name, gauge in gauges.items():
            self._percents[name].append(gauge())

    def _open_gauges(self, stack: ExitStack) -> dict[str, Gauge]:
        gauges = {_process_key(worker): _process_gauge(worker) for worker in self._workers if _is_cpu(worker)}
        if any(worker.device.startswith("cuda") for worker in self._workers):
            gauges |= _gpu_gauges(stack)
        return gauges


def _is_cpu(worker: Worker) -> bool:
    return worker.device.startswith("cpu")


def _process_key(worker: Worker) -> str:
    return f"rank {worker.rank}"


def _process_gauge(worker: Worker) -> Gauge:
    """CPU time of the rank's process as a part of what its threads could use; throttled ranks stay below 100."""
    import psutil

    clock = _ProcessClock(worker.pid, worker.num_threads)
    try:
        clock.open(psutil)
    except psutil.Error:
        return lambda: None
    return clock.percent


class _ProcessClock:
    """The CPU time of one process between two readings."""

    def __init__(self, pid: int, num_threads: int) -> None:
        self._pid = pid
        self._num_threads = num_threads
        self._used_s = self._read_at_s = 0.0

    def open(self, psutil: Any) -> None:
        self._error: type[Exception] = psutil.Error
        self._process = psutil.Process(self._pid)
        self._used_s, self._read_at_s = self._read()

    def percent(self) -> float | None:
        try:
            used_s, read_at_s = self._read()
        except self._error:
            return None
        busy = (used_s - self._used_s) / max(1e-9, read_at_s - self._read_at_s) / self._num_threads
        self._used_s, self._read_at_s = used_s, read_at_s
        return round(min(100.0, 100.0 * busy), 1)

    def _read(self) -> tuple[float, float]:
        times = self._process.cpu_times()
        return times.user + times.system, time.perf_counter()


def _gpu_gauges(stack: ExitStack) -> dict[str, Gauge]:
    """One per GPU that NVML shows, by UUID: torch numbers GPUs in another order than NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        # No library, no driver, no permission: a machine without NVML trains all the same.
        return {}
    stack.callback(pynvml.nvmlShutdown)
    gauges = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        gauges[_text(pynvml.nvmlDeviceGetUUID(handle))] = _gpu_gauge(pynvml, handle)
    return gauges


def _gpu_gauge(library: Any, handle: Any) -> Gauge:
    """The whole GPU's, whoever uses it: slices of one GPU show the same."""

    def read() -> float | None:
        try:
            return float(library.nvmlDeviceGetUtilizationRates(handle).gpu)
        except library.NVMLError:
            return None

    return read


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
