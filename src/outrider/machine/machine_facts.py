"""The facts about a machine, each with its source; unknown facts are None.

Holds no judgement (see verdicts) and nothing that names a person, a host or a single piece of hardware.
Written by detect and by the probes, read by verdicts, resolve and setup, stored and replayed as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outrider.errors import DataError
from outrider.machine import codec

SCHEMA_VERSION = 1

Sources = dict[str, str]
"""Field name to the place it was read from."""

Vendor = Literal["nvidia", "amd", "intel", "other"]
Flavour = Literal["open", "proprietary", "wsl", "in-tree"]
ReductionOutcome = Literal["ok", "wrong", "hang", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The system that everything runs on."""

    system: str
    architecture: str
    kernel: str | None = None
    distribution: str | None = None
    container: str | None = None
    is_wsl: bool = False
    python: str | None = None
    sources: Sources = field(default_factory=dict)

    @property
    def platform(self) -> str:
        """System and architecture as the wheel table names them, `linux-x86_64`."""
        machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(self.architecture, self.architecture)
        return f"{self.system.lower()}-{machine}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """The processor; `cores` are physical, `usable` what this process may use."""

    model: str | None = None
    cores: int | None = None
    threads: int | None = None
    usable: int | None = None
    sources: Sources = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Host memory, and the shared memory that worker processes hand tensors through."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    shared_bytes: int | None = None
    sources: Sources = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """The file system of the working directory, or of the torch variants if some are to be installed."""

    total_bytes: int | None = None
    free_bytes: int | None = None
    sources: Sources = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class MigSlice:
    """One MIG instance of a GPU."""

    name: str
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One card; `is_served` is False if it sits on the bus but its driver does not offer it."""

    index: int
    vendor: Vendor
    name: str
    capability: str | None = None
    """`12.0` for NVIDIA, `gfx1100` for AMD."""
    memory_bytes: int | None = None
    is_served: bool = True
    pci_bus_id: str | None = None
    pcie_generation: int | None = None
    pcie_max_generation: int | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] = ()
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    is_mig: bool | None = None
    mig_slices: tuple[MigSlice, ...] = ()
    sources: Sources = field(default_factory=dict)

    @property
    def device(self) -> str:
        return f"cuda:{self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuDriver:
    """The kernel driver of the cards; `cuda` is the newest CUDA it serves."""

    vendor: Vendor
    version: str | None = None
    cuda: str | None = None
    flavour: Flavour | None = None
    is_mps_running: bool | None = None
    sources: Sources = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolkit:
    """A CUDA toolkit with a compiler."""

    version: str
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """A shared library on the system, such as NCCL."""

    name: str
    version: str | None
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Docker:
    """Docker's command line, and whether it knows the NVIDIA runtime."""

    version: str | None = None
    has_nvidia_runtime: bool | None = None
    sources: Sources = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """A network interface, without its addresses."""

    name: str
    is_up: bool
    speed_mbit_per_s: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild:
    """A torch that some interpreter can import, as it describes itself; or the error it gave."""

    interpreter: str
    origin: str
    python: str | None = None
    version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    archs: tuple[str, ...] = ()
    cudnn: str | None = None
    nccl: str | None = None
    num_devices: int | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerLink:
    """Whether two cards reach each other's memory directly."""

    first: int
    second: int
    has_peer_access: bool | None
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """One all-reduce of two ranks, really run, its numbers compared."""

    backend: str
    devices: tuple[str, ...]
    outcome: ReductionOutcome
    detail: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSpeed:
    """The result of a short probe on one device; `error` if it failed."""

    device: str
    matmul_tflops: float | None = None
    memory_gb_per_s: float | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """A check that was not possible."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything known about one machine at one time."""

    host: Host
    schema_version: int = SCHEMA_VERSION
    origin: str | None = None
    """The origin of a recorded file; None for a live measurement."""
    cpu: Cpu = Cpu()
    memory: Memory = Memory()
    disk: Disk = Disk()
    drivers: tuple[GpuDriver, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    num_hidden: int = 0
    """Cards that CUDA_VISIBLE_DEVICES keeps from training; they are not in `gpus`."""
    links: tuple[PeerLink, ...] = ()
    toolkits: tuple[Toolkit, ...] = ()
    libraries: tuple[Library, ...] = ()
    docker: Docker | None = None
    interfaces: tuple[Interface, ...] = ()
    torches: tuple[TorchBuild, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    speeds: tuple[MeasuredSpeed, ...] = ()
    troubles: tuple[Trouble, ...] = ()

    def driver(self, vendor: Vendor) -> GpuDriver | None:
        """The driver of a vendor's cards, if one is loaded."""
        return next((driver for driver in self.drivers if driver.vendor == vendor), None)

    @property
    def torch(self) -> TorchBuild | None:
        """The build that training here would use: the first that answered, else the first that failed."""
        answered = [build for build in self.torches if build.error is None]
        return next(iter(answered or self.torches), None)


def load_facts(path: Path) -> Facts:
    """Recorded facts from a file: facts alone, or a whole document of `outrider diagnose --json`."""
    data = codec.read_json(path)
    if isinstance(data, dict) and "facts" in data:
        data = data["facts"]
    facts = codec.decode(Facts, data, where=path.name)
    if facts.schema_version != SCHEMA_VERSION:
        raise DataError(
            f"{path.name} has schema_version {facts.schema_version}, this outrider reads {SCHEMA_VERSION}",
            hint="record it again with `outrider diagnose --json`",
        )
    return facts
