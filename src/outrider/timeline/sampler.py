"""Samples the utilization of devices during a run: NVML for GPUs, psutil for the processes of CPU ranks.

Decides what is read and when, and how many samples are kept; `idle` interprets them. Runs in one thread of the starter,
or of a session's rank 0, for the duration of the run. A device or a driver may be missing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from outrider.errors import named
from outrider.timeline.device_conditions import (
    Condition,
    DeviceFile,
    gpu_condition,
    process_condition,
    process_key,
)

PERIOD_S = 0.1
MAX_SAMPLES = 36_000
"""The samples of one hour; in a longer run each sample is the mean of 2, 4, 8 … readings."""

Gauge = Callable[[], float | None]
"""Utilization of a device in percent since the last reading; None if unknown."""
Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledProcess:
    """The facts about a rank that the sampler needs."""

    rank: int
    device: str
    pid: int
    num_threads: int


class Sampler:
    """Samples utilization from `begin()`, when the ranks run, until `end()` or until `is_over` returns true."""

    def __init__(
        self,
        workers: Iterable[SampledProcess],
        *,
        origin_s: float,
        is_over: Callable[[], bool],
        folder: Path | None = None,
    ) -> None:
        """`origin_s` is the wall-clock time of the run's start, as in the recorders.

        `folder` is the run folder, where the live page reads the state of the devices during the run.
        """
        self._workers = tuple(workers)
        self._is_over = is_over
        self._offset_s = time.time() - origin_s - time.perf_counter()
        self._series = _Series()
        self._live = None if folder is None else DeviceFile(folder, origin_s=origin_s)
        self._trouble: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outrider-sampler", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Stop sampling and end the thread."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._trouble is not None:
            print(f"outrider: utilization was not sampled to the end of the run: {self._trouble}", file=sys.stderr)
            self._trouble = None

    def utilization(self, events: Iterable[Event]) -> dict[str, Any]:
        """The samples in the form of `timeline.json`; the event `ready` of a rank says which GPU it used."""
        gpus = {event["rank"]: event.get("gpu") for event in events if event["kind"] == "ready"}
        devices = [self._of_rank(worker, gpus.get(worker.rank)) for worker in self._workers]
        period_ms = round(PERIOD_S * 1e3 * self._series.readings_per_sample)
        return {"period_ms": period_ms, "t": self._series.times_s, "devices": devices}

    def _of_rank(self, worker: SampledProcess, gpu: str | None) -> dict[str, Any]:
        source = "psutil" if worker.device.startswith("cpu") else "nvml"
        percent = self._series.percents.get(process_key(worker.rank) if source == "psutil" else str(gpu))
        return {"rank": worker.rank, "device": worker.device, "source": source, "percent": percent}

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                gauges = self._open_gauges(stack)
                self._series.begin(gauges)
                if self._live is not None:
                    stack.enter_context(self._live)
                while not self._ended.wait(PERIOD_S) and not self._is_over():
                    self._sample(gauges)
        except Exception as error:  # `end` reports it: the run must not fail because of it, nor hide it
            self._trouble = named(error)

    def _sample(self, gauges: Mapping[str, Gauge]) -> None:
        now_s = round(time.perf_counter() + self._offset_s, 3)
        percents = {name: gauge() for name, gauge in gauges.items()}
        self._series.add(now_s, percents)
        if self._live is not None:
            self._live.add(now_s, percents)

    def _open_gauges(self, stack: ExitStack) -> dict[str, Gauge]:
        gauges = {}
        for worker in self._workers:
            if _is_cpu(worker):
                key = process_key(worker.rank)
                gauges[key] = _process_gauge(worker)
                self._add_condition(key, partial(process_condition, worker.pid))
        if any(worker.device.startswith("cuda") for worker in self._workers):
            gauges |= self._gpu_gauges(stack)
        return gauges

    def _add_condition(self, key: str, read: Condition) -> None:
        if self._live is not None:
            self._live.conditions[key] = read

    def _gpu_gauges(self, stack: ExitStack) -> dict[str, Gauge]:
        """One gauge per GPU that NVML lists, by UUID, because torch numbers GPUs in another order than NVML."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:
            # The library, driver or permission is missing; training works without NVML.
            return {}
        stack.callback(pynvml.nvmlShutdown)
        gauges = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
            gauges[uuid] = _gpu_gauge(pynvml, handle)
            self._add_condition(uuid, partial(gpu_condition, pynvml, handle))
        return gauges


class _Series:
    """A bounded number of readings of all gauges; when it is full, each pair of neighbours is replaced by its mean."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.percents: dict[str, list[float | None]] = {}
        self.readings_per_sample = 1
        self._pending: list[Mapping[str, float | None]] = []

    def begin(self, names: Iterable[str]) -> None:
        self.percents = {name: [] for name in names}

    def add(self, now_s: float, reading: Mapping[str, float | None]) -> None:
        """Add a reading; a sample has the time of its last reading and covers the time since the previous sample."""
        self._pending.append(reading)
        if len(self._pending) < self.readings_per_sample:
            return
        self.times_s.append(now_s)
        for name, values in self.percents.items():
            values.append(_mean([one[name] for one in self._pending]))
        self._pending = []
        if len(self.times_s) >= MAX_SAMPLES:
            self._halve()

    def _halve(self) -> None:
        self.times_s[:] = self.times_s[1::2]
        for values in self.percents.values():
            values[:] = [_mean(values[i : i + 2]) for i in range(0, 2 * len(self.times_s), 2)]
        self.readings_per_sample *= 2


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 1) if known else None


def _is_cpu(worker: SampledProcess) -> bool:
    return worker.device.startswith("cpu")


def _process_gauge(worker: SampledProcess) -> Gauge:
    """CPU time of the rank's process in percent of the time of its threads; throttled ranks stay below 100."""
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


def _gpu_gauge(library: Any, handle: Any) -> Gauge:
    """Utilization of the whole GPU by all processes; all slices of a GPU have the same value."""

    def read() -> float | None:
        try:
            return float(library.nvmlDeviceGetUtilizationRates(handle).gpu)
        except library.NVMLError:
            return None

    return read


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
