"""What NVML tells, through a stand-in of its binding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.machine.machine_facts import MigSlice, PeerLink, Trouble
from outrider.machine.nvml import read_library


class NvmlError(Exception):
    """As in pynvml, with the code in `value`."""

    def __init__(self, value: int, text: str = "Not Supported") -> None:
        super().__init__(text)
        self.value = value


class StandIn:
    """Two cards, the second of which answers hardly anything; init may fail."""

    NVMLError = NvmlError
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0
    NVML_P2P_CAPS_INDEX_READ = 0
    NVML_P2P_STATUS_OK = 0
    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonHwSlowdown = 8

    def __init__(self, failure: NvmlError | None = None) -> None:
        self.failure = failure
        self.is_open = False

    def nvmlInit(self) -> None:
        if self.failure:
            raise self.failure
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.95.05"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return "NVIDIA A100 MIG 1g.10gb" if handle == "slice" else "NVIDIA A100"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self._only_first(handle, (8, 0))

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> SimpleNamespace:
        return self._only_first(handle, SimpleNamespace(total=1000))

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:0{handle + 1}:00.0".upper())

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return self._only_first(handle, 1000 * kind)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self._only_first(handle, 4)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return self._only_first(handle, 121_402)

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return self._only_first(handle, [1, 1])

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return self._only_first(handle, 2)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> str:
        if index == 1:
            raise NvmlError(6, "Not Found")
        return "slice"

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, what: int) -> int:
        return 3

    def _only_first(self, handle: Any, value: Any) -> Any:
        if handle == 1:
            raise NvmlError(3)
        return value


def test_the_driver_and_its_cuda_are_read() -> None:
    driver = read_library(StandIn()).driver
    assert driver is not None
    assert (driver.version, driver.cuda) == ("580.95.05", "13.0")


def test_a_card_is_read_with_its_source() -> None:
    card = read_library(StandIn()).gpus[0]
    assert (card.name, card.capability, card.memory_bytes) == ("NVIDIA A100", "8.0", 1000)
    assert (card.sm_clock_mhz, card.memory_clock_mhz, card.power_w) == (1000, 2000, 121.402)
    assert card.throttle_reasons == ("power cap",)
    assert card.pci_bus_id == "0000:01:00.0"
    assert card.sources == {"*": "NVML"}


def test_what_a_card_does_not_tell_is_unknown() -> None:
    card = read_library(StandIn()).gpus[1]
    assert (card.capability, card.memory_bytes, card.power_w, card.is_mig) == (None, None, None, None)


def test_a_question_that_the_binding_does_not_know_is_unknown() -> None:
    assert read_library(StandIn()).gpus[0].pcie_width is None


def test_mig_slices_are_listed_and_empty_places_skipped() -> None:
    card = read_library(StandIn()).gpus[0]
    assert card.is_mig is True
    assert card.mig_slices == (MigSlice(name="NVIDIA A100 MIG 1g.10gb", memory_bytes=1000),)


def test_peer_access_is_asked_for_each_pair() -> None:
    assert read_library(StandIn()).links == (PeerLink(first=0, second=1, has_peer_access=False, source="NVML"),)


def test_a_missing_library_or_driver_is_a_normal_answer() -> None:
    for code in (9, 12):
        reading = read_library(StandIn(NvmlError(code)))
        assert (reading.gpus, reading.driver, reading.trouble) == ((), None, None)


def test_a_library_that_cannot_be_read_is_a_trouble() -> None:
    reading = read_library(StandIn(NvmlError(18, "Driver/library version mismatch")))
    assert reading.trouble == Trouble(what="NVML", why="Driver/library version mismatch")


def test_nvml_is_shut_down_after_reading() -> None:
    library = StandIn()
    read_library(library)
    assert library.is_open is False
