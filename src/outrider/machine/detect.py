"""Gathers the facts of this machine: processor, memory, disk, network, cards, CUDA, NCCL, docker and torch builds.

Decides which source is asked first: NVML, then /proc and /sys for what it does not tell. Each torch is asked in a child
process. Asks for no host name, user name or address. Called by `diagnose`, `setup` and `torch`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.machine import child_process
from outrider.machine.bus import amd_driver, cards_on_bus, nvidia_driver, read_text
from outrider.machine.devices import CARD_ORDER, visible_cards
from outrider.machine.machine_facts import (
    Cpu,
    Disk,
    Docker,
    Facts,
    Gpu,
    GpuDriver,
    Host,
    Interface,
    Library,
    Memory,
    PeerLink,
    Toolkit,
    TorchBuild,
)
from outrider.machine.nvml import read_nvml


def read_host(root: Path) -> Host:
    container = _container(root)
    release = platform.release()
    return Host(
        system=platform.system(),
        architecture=platform.machine(),
        kernel=release,
        distribution=_distribution(root),
        container=container,
        is_wsl="microsoft" in release.lower(),
        python=platform.python_version(),
        sources={
            "system": "uname",
            "distribution": "/etc/os-release",
            "container": "/.dockerenv, /run/.containerenv, /proc/1/cgroup, environment",
            "is_wsl": "uname",
        },
    )


def read_cpu(root: Path) -> Cpu:
    import psutil

    return Cpu(
        model=_cpu_model(root),
        cores=psutil.cpu_count(logical=False),
        threads=psutil.cpu_count(),
        usable=_usable_threads(),
        sources={"model": "/proc/cpuinfo", "cores": "psutil", "threads": "psutil", "usable": "sched_getaffinity"},
    )


def read_memory(root: Path) -> Memory:
    import psutil

    memory = psutil.virtual_memory()
    return Memory(
        total_bytes=memory.total,
        available_bytes=memory.available,
        shared_bytes=_file_system_bytes(root / "dev/shm"),
        sources={"total_bytes": "psutil", "available_bytes": "psutil", "shared_bytes": "/dev/shm"},
    )


def read_disk(folder: Path) -> Disk:
    usage = shutil.disk_usage(folder)
    sources = {"total_bytes": "statvfs", "free_bytes": "statvfs"}
    return Disk(total_bytes=usage.total, free_bytes=usage.free, sources=sources)


def read_interfaces() -> tuple[Interface, ...]:
    import psutil

    found = psutil.net_if_stats().items()
    # psutil writes 0 for a speed that the driver does not tell.
    return tuple(
        Interface(name=name, is_up=stats.isup, speed_mbit_per_s=stats.speed or None) for name, stats in sorted(found)
    )


def _usable_threads() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _cpu_model(root: Path) -> str | None:
    text = read_text(root / "proc/cpuinfo") or ""
    match = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else _arm_model(text) or platform.processor() or None


def _arm_model(text: str) -> str | None:
    """Linux on ARM names maker and part by number only, as `lscpu` does where it knows no better."""
    maker = re.search(r"^CPU implementer\s*:\s*(\w+)$", text, re.MULTILINE)
    part = re.search(r"^CPU part\s*:\s*(\w+)$", text, re.MULTILINE)
    return f"ARM implementer {maker[1]} part {part[1]}" if maker and part else None


def _distribution(root: Path) -> str | None:
    match = re.search(r'^PRETTY_NAME="?(.+?)"?$', read_text(root / "etc/os-release") or "", re.MULTILINE)
    return match[1] if match else None


def _container(root: Path) -> str | None:
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if "SINGULARITY_CONTAINER" in os.environ or "APPTAINER_CONTAINER" in os.environ:
        return "apptainer"
    match = re.search(r"docker|containerd|lxc|kubepods", read_text(root / "proc/1/cgroup") or "")
    return match[0] if match else None


def _file_system_bytes(folder: Path) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


_ASK_S = 5.0
_NCCL_PLACES = ("usr/lib", "usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/local/lib")


def find_toolkits(root: Path) -> tuple[Toolkit, ...]:
    """Every CUDA toolkit with a compiler: CUDA_HOME, PATH and /usr/local."""
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places += sorted(map(str, (root / "usr/local").glob("cuda*")))
    found = {}
    for folder in filter(None, places):
        toolkit = _toolkit(Path(folder).resolve())
        if toolkit:
            found[toolkit.path] = toolkit
    compiler = shutil.which("nvcc")
    by_path = _toolkit(Path(compiler).resolve().parent.parent) if compiler else None
    # A compiler on PATH may be a wrapper of one that is found already, so its folder is not to be trusted.
    if by_path and by_path.version not in {toolkit.version for toolkit in found.values()}:
        found[by_path.path] = by_path
    return tuple(found.values())


def find_nccl(root: Path) -> tuple[Library, ...]:
    """NCCL on the system; torch brings its own, which its build tells."""
    found = {}
    for place in _NCCL_PLACES:
        for path in sorted((root / place).glob("libnccl.so*")):
            real = path.resolve()
            match = re.search(r"\.so\.(\d+(?:\.\d+)*)$", real.name)
            found[str(real)] = Library(name="nccl", version=match[1] if match else None, path=str(real))
    return tuple(found.values())


def find_docker() -> Docker | None:
    """Docker's version; None if there is no docker command."""
    if shutil.which("docker") is None:
        return None
    ended = child_process.run(("docker", "--version"), timeout_s=_ASK_S)
    match = re.search(r"version ([\d.]+)", ended.stdout)
    return Docker(
        version=match[1] if match else None,
        has_nvidia_runtime=shutil.which("nvidia-container-runtime") is not None
        or shutil.which("nvidia-ctk") is not None,
        sources={"version": "docker --version", "has_nvidia_runtime": "PATH"},
    )


def is_mps_running() -> bool:
    """Whether an MPS control daemon runs on this machine."""
    import psutil

    return any(
        (process.info["name"] or "").startswith("nvidia-cuda-mps") for process in psutil.process_iter(attrs=["name"])
    )


def _toolkit(folder: Path) -> Toolkit | None:
    compiler = folder / "bin" / "nvcc"
    if not compiler.exists():
        return None
    ended = child_process.run((str(compiler), "--version"), timeout_s=_ASK_S)
    match = re.search(r"release (\d+\.\d+)", ended.stdout)
    return Toolkit(version=match[1], path=str(folder)) if match else None


ASK_S = 60.0


def candidate_interpreters(folder: Path, variants: dict[str, Path]) -> dict[str, str]:
    """Interpreter to where it was found; the one that training here would use comes first."""
    candidates: list[tuple[str, Path | None]] = [(f"variant {name}", path) for name, path in variants.items()]
    candidates.append(("this Python", Path(sys.executable)))
    candidates += [(variable, _python_in(os.environ.get(variable))) for variable in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    candidates.append((".venv", _python_in(str(folder / ".venv"))))
    candidates.append(("PATH", _on_path("python3")))
    # By folder and not resolved: python and python3 of one environment are one, while the environments of one Python
    # all link to the same file.
    found: dict[str, tuple[str, str]] = {}
    for origin, path in candidates:
        if path is not None and path.exists():
            absolute = os.path.abspath(path)
            found.setdefault(os.path.dirname(absolute), (absolute, origin))
    return dict(found.values())


def ask_torch(interpreter: str, *, origin: str, timeout_s: float = ASK_S) -> TorchBuild | None:
    """What this interpreter's torch says of itself; None if it has no torch at all."""
    command = (interpreter, str(child_process.script("torch_info.py")))
    ended = child_process.run(command, timeout_s=timeout_s, environment=CARD_ORDER)
    found = child_process.answer(ended)
    if found is not None:
        return _build(interpreter, origin, found)
    if "No module named 'torch'" in ended.last_line:
        return None
    return TorchBuild(interpreter=interpreter, origin=origin, error=ended.reason or ended.last_line)


def find_torches(folder: Path, variants: dict[str, Path]) -> tuple[TorchBuild, ...]:
    """Every torch build that an interpreter here can import, or fails to."""
    candidates = candidate_interpreters(folder, variants)
    builds = [ask_torch(interpreter, origin=origin) for interpreter, origin in candidates.items()]
    return tuple(build for build in builds if build is not None)


def _build(interpreter: str, origin: str, found: dict[str, Any]) -> TorchBuild:
    return TorchBuild(interpreter=interpreter, origin=origin, **{**found, "archs": tuple(found.get("archs") or ())})


def _python_in(prefix: str | None) -> Path | None:
    return Path(prefix) / "bin" / "python" if prefix else None


def _on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None


ROOT = Path("/")


def detect(folder: Path, *, variants: dict[str, Path], root: Path = ROOT) -> Facts:
    """All facts of this machine; `variants` are torch environments by name, the active one first."""
    machine = detect_machine(folder, root=root)
    return replace(machine, torches=find_torches(folder, variants))


def detect_machine(folder: Path, *, root: Path = ROOT) -> Facts:
    """The facts of this machine without the torch builds, which take seconds to ask."""
    reading = read_nvml()
    cards = merge_cards(reading.gpus, cards_on_bus(root))
    order = visible_cards() if "CUDA_VISIBLE_DEVICES" in os.environ and reading.gpus else None
    gpus = cards if order is None else only_visible(cards, order)
    return Facts(
        host=read_host(root),
        cpu=read_cpu(root),
        memory=read_memory(root),
        disk=read_disk(folder),
        drivers=tuple(_drivers(reading.driver, root)),
        gpus=gpus,
        num_hidden=len(cards) - len(gpus),
        links=reading.links if order is None else _links_between(order, reading.links),
        toolkits=find_toolkits(root),
        libraries=find_nccl(root),
        docker=find_docker(),
        interfaces=read_interfaces(),
        troubles=(reading.trouble,) if reading.trouble else (),
    )


def merge_cards(told: tuple[Gpu, ...], on_bus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """NVML's cards, then those on the bus that it does not know; an NVIDIA card it leaves out is not served."""
    known = {gpu.pci_bus_id for gpu in told}
    others = [gpu for gpu in on_bus if gpu.pci_bus_id not in known]
    if told:
        others = [_unserved(gpu, index) for index, gpu in enumerate(others, start=len(told))]
    return told + tuple(others)


def only_visible(cards: tuple[Gpu, ...], order: Sequence[int | None]) -> tuple[Gpu, ...]:
    """The cards as CUDA numbers them where CUDA_VISIBLE_DEVICES names some; those of other drivers stay."""
    if None in order:
        # A MIG slice is one device of a card that is shown whole.
        return cards
    told = {gpu.index: gpu for gpu in cards if gpu.vendor == "nvidia" and gpu.is_served}
    shown = [replace(told[card], index=index) for index, card in enumerate(order) if card is not None]
    return (*shown, *(gpu for gpu in cards if gpu not in told.values()))


def _links_between(order: Sequence[int | None], links: tuple[PeerLink, ...]) -> tuple[PeerLink, ...]:
    place = {card: index for index, card in enumerate(order) if card is not None}
    both = [link for link in links if link.first in place and link.second in place]
    return tuple(replace(link, first=place[link.first], second=place[link.second]) for link in both)


def _unserved(gpu: Gpu, index: int) -> Gpu:
    return replace(gpu, index=index, is_served=False) if gpu.vendor == "nvidia" else gpu


def _drivers(told: GpuDriver | None, root: Path) -> list[GpuDriver]:
    module = nvidia_driver(root)
    found = []
    if told or module:
        nvidia = told or GpuDriver(vendor="nvidia", version=module.version if module else None)
        sources = {**(module.sources if module else {}), **nvidia.sources, "is_mps_running": "process list"}
        flavour = module.flavour if module else None
        found.append(replace(nvidia, flavour=flavour, is_mps_running=is_mps_running(), sources=sources))
    amd = amd_driver(root)
    return [*found, amd] if amd else found
