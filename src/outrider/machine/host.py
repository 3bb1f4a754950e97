"""Reads processor, memory, disk, system, container and network of this machine.

Decides nothing, and asks for no host name, user name or address. Called by detect.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from pathlib import Path

from outrider.machine.facts import Cpu, Disk, Host, Interface, Memory


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
    text = _read(root / "proc/cpuinfo")
    match = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else _arm_model(text) or platform.processor() or None


def _arm_model(text: str) -> str | None:
    """Linux on ARM names maker and part by number only, as `lscpu` does where it knows no better."""
    maker = re.search(r"^CPU implementer\s*:\s*(\w+)$", text, re.MULTILINE)
    part = re.search(r"^CPU part\s*:\s*(\w+)$", text, re.MULTILINE)
    return f"ARM implementer {maker[1]} part {part[1]}" if maker and part else None


def _distribution(root: Path) -> str | None:
    match = re.search(r'^PRETTY_NAME="?(.+?)"?$', _read(root / "etc/os-release"), re.MULTILINE)
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
    match = re.search(r"docker|containerd|lxc|kubepods", _read(root / "proc/1/cgroup"))
    return match[0] if match else None


def _file_system_bytes(folder: Path) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
