"""Reads NVIDIA cards through NVML, and reports if it cannot.

Decides nothing; a missing library or driver is a normal answer. UUIDs and serial numbers are never asked for.
Called by detect, which reads missing facts through bus.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from outrider.machine.machine_facts import Gpu, GpuDriver, MigSlice, PeerLink, Trouble

_THROTTLE_REASONS = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "software thermal slowdown",
    "HwThermalSlowdown": "hardware thermal slowdown",
    "HwPowerBrakeSlowdown": "power brake",
    "SyncBoost": "sync boost",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The facts from NVML; `trouble` if NVML exists but cannot be read."""

    gpus: tuple[Gpu, ...] = ()
    driver: GpuDriver | None = None
    links: tuple[PeerLink, ...] = ()
    trouble: Trouble | None = None


def read_nvml() -> Reading:
    """All facts from NVML; empty without NVML."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return Reading()
    return read_library(library)


def read_library(library: Any) -> Reading:
    """All facts from this NVML binding."""
    try:
        with _initialised(library):
            return _read(library)
    except library.NVMLError as error:
        if _is_absent(library, error):
            return Reading()
        return Reading(trouble=Trouble(what="NVML", why=str(error)))


@contextmanager
def _initialised(library: Any) -> Iterator[None]:
    library.nvmlInit()
    try:
        yield
    finally:
        library.nvmlShutdown()


def _is_absent(library: Any, error: Exception) -> bool:
    code = getattr(error, "value", None)
    return code in (library.NVML_ERROR_LIBRARY_NOT_FOUND, library.NVML_ERROR_DRIVER_NOT_LOADED)


def _read(library: Any) -> Reading:
    handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
    return Reading(
        gpus=tuple(_read_gpu(library, index, handle) for index, handle in enumerate(handles)),
        driver=_read_driver(library),
        links=tuple(_read_links(library, handles)),
    )


def _read_driver(library: Any) -> GpuDriver:
    version = _ask(library, library.nvmlSystemGetDriverVersion)
    cuda = _ask(library, library.nvmlSystemGetCudaDriverVersion_v2)
    return GpuDriver(
        vendor="nvidia",
        version=_text(version),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        sources={"version": "NVML", "cuda": "NVML"},
    )


def _read_gpu(library: Any, index: int, handle: Any) -> Gpu:
    def ask(name: str, *arguments: Any) -> Any:
        return _ask(library, getattr(library, name, None), handle, *arguments)

    capability = ask("nvmlDeviceGetCudaComputeCapability")
    memory = ask("nvmlDeviceGetMemoryInfo")
    return Gpu(
        index=index,
        vendor="nvidia",
        name=_text(ask("nvmlDeviceGetName")) or "unknown NVIDIA card",
        capability=f"{capability[0]}.{capability[1]}" if capability else None,
        memory_bytes=int(memory.total) if memory else None,
        pci_bus_id=_bus_id(ask("nvmlDeviceGetPciInfo")),
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_max_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_max_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", library.NVML_CLOCK_SM),
        max_sm_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", library.NVML_CLOCK_SM),
        memory_clock_mhz=ask("nvmlDeviceGetClockInfo", library.NVML_CLOCK_MEM),
        throttle_reasons=_throttle_reasons(library, ask("nvmlDeviceGetCurrentClocksThrottleReasons")),
        power_w=_watts(ask("nvmlDeviceGetPowerUsage")),
        power_limit_w=_watts(ask("nvmlDeviceGetEnforcedPowerLimit")),
        temperature_c=ask("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU),
        is_mig=_is_mig(ask("nvmlDeviceGetMigMode")),
        mig_slices=tuple(_read_slices(library, handle)),
        sources={"*": "NVML"},
    )


def _read_slices(library: Any, handle: Any) -> Iterator[MigSlice]:
    count = _ask(library, getattr(library, "nvmlDeviceGetMaxMigDeviceCount", None), handle) or 0
    for index in range(count):
        piece = _ask(library, library.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if piece is None:
            continue
        memory = _ask(library, library.nvmlDeviceGetMemoryInfo, piece)
        name = _text(_ask(library, library.nvmlDeviceGetName, piece)) or f"slice {index}"
        yield MigSlice(name=name, memory_bytes=int(memory.total) if memory else None)


def _read_links(library: Any, handles: list[Any]) -> Iterator[PeerLink]:
    for first, one in enumerate(handles):
        for second in range(first + 1, len(handles)):
            status = _ask(
                library, library.nvmlDeviceGetP2PStatus, one, handles[second], library.NVML_P2P_CAPS_INDEX_READ
            )
            has_access = None if status is None else status == library.NVML_P2P_STATUS_OK
            yield PeerLink(first=first, second=second, has_peer_access=has_access, source="NVML")


def _ask(library: Any, question: Callable[..., Any] | None, *arguments: Any) -> Any:
    """The answer, or None if this card or this driver has none."""
    if question is None:
        return None
    try:
        return question(*arguments)
    except library.NVMLError:
        return None


def _throttle_reasons(library: Any, mask: int | None) -> tuple[str, ...]:
    if not mask:
        return ()
    bits = {name: getattr(library, f"nvmlClocksThrottleReason{name}", 0) for name in _THROTTLE_REASONS}
    return tuple(text for name, text in _THROTTLE_REASONS.items() if mask & bits[name])


def _is_mig(mode: Any) -> bool | None:
    return None if mode is None else bool(mode[0])


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _bus_id(info: Any) -> str | None:
    text = _text(getattr(info, "busId", None))
    # NVML writes the domain with eight digits, the kernel with four.
    return text.lower()[-12:] if text else None
