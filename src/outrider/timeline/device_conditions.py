"""The condition of devices during a run: utilization, memory and its limit, temperature, throttling.

Decides which values are read from a device, and writes them once a second to a file of bounded size. The sampler's
thread calls it; the live page reads the file.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outrider.timeline.bounded_file import LIVE, BoundedFile, read_header

DEVICES = "devices.jsonl"
PERIOD_S = 1.0
SCHEMA_VERSION = 1

Condition = Callable[[], dict[str, Any]]
"""Reads memory, temperature and throttling of one device; unknown values are left out."""

# Bits of nvmlClocksEventReasons; idle clocks and clocks set by a user do not count as throttling.
_THROTTLING = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


def process_key(rank: int) -> str:
    """The key of a rank on a CPU; the key of a GPU is its UUID."""
    return f"rank {rank}"


def process_condition(pid: int) -> dict[str, Any]:
    """Resident memory of a process, and the memory of the machine."""
    import psutil

    try:
        used_bytes = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return {}
    return {"memory_bytes": used_bytes, "memory_limit_bytes": psutil.virtual_memory().total}


def gpu_condition(library: Any, handle: Any) -> dict[str, Any]:
    """Memory, temperature and throttling of a whole GPU, as far as NVML provides them."""
    found: dict[str, Any] = {}
    for read in (_memory, _temperature, _throttling):
        try:
            found |= read(library, handle)
        except (library.NVMLError, AttributeError):
            # Older drivers and slices of a GPU do not provide all values.
            continue
    return found


def _memory(library: Any, handle: Any) -> dict[str, Any]:
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_bytes": int(memory.used), "memory_limit_bytes": int(memory.total)}


def _temperature(library: Any, handle: Any) -> dict[str, Any]:
    return {"temperature_c": int(library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU))}


def _throttling(library: Any, handle: Any) -> dict[str, Any]:
    reasons = int(library.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    names = [name for bit, name in _THROTTLING.items() if reasons & bit]
    return {"throttled_by": ", ".join(names)} if names else {}


class DeviceFile:
    """`with DeviceFile(folder) as file:`, then `add()` readings of utilization; writes one line a second.

    The file is started after rank 0 has started its own file, because before that the folder may belong to another run.
    """

    def __init__(self, folder: Path, *, origin_s: float) -> None:
        self.conditions: dict[str, Condition] = {}
        self._origin_s = origin_s
        self._folder = folder / LIVE
        self._file = BoundedFile(self._folder / DEVICES, join=joined_readings)
        self._is_open = False
        self._pending: list[Mapping[str, float | None]] = []
        self._written_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, now_s: float, percents: Mapping[str, float | None]) -> None:
        self._pending.append(percents)
        if now_s - self._written_s < PERIOD_S:
            return
        self._is_open = self._is_open or self._begin()
        if not self._is_open:
            self._pending = []
            return
        devices = {key: {"percent": _mean([one[key] for one in self._pending])} for key in percents}
        self._pending, self._written_s = [], now_s
        for key, read in self.conditions.items():
            devices[key] |= read()
        self._file.add({"t": now_s, "devices": devices})

    def _begin(self) -> bool:
        header = read_header(self._folder / "rank0.jsonl")
        if header is None or header.get("origin_s") != self._origin_s:
            return False
        self._file.open({"schema_version": SCHEMA_VERSION, "origin_s": self._origin_s})
        return True


def joined_readings(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge several lines into one: the mean utilization, and the last value of everything else."""
    last = lines[-1]
    devices = {
        key: {**device, "percent": _mean([line["devices"].get(key, {}).get("percent") for line in lines])}
        for key, device in last["devices"].items()
    }
    return {"t": last["t"], "devices": devices}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 1) if known else None
