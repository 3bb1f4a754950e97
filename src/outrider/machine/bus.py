"""Reads graphics cards and their kernel driver from /proc and /sys, for facts that NVML does not report.

Decides nothing; `root` is the file system to read, so that recorded trees can be read too. Called by detect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from outrider.machine.machine_facts import Flavour, Gpu, GpuDriver, Vendor
from outrider.machine.wheels import capability_by_name

_VENDORS: dict[str, Vendor] = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
_PCI_ID_FILES = ("usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids")
_GIGATRANSFERS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}


def cards_on_bus(root: Path) -> tuple[Gpu, ...]:
    """Every NVIDIA and AMD display card on the PCI bus, numbered per vendor in bus order."""
    found: list[Gpu] = []
    for folder in sorted(_folders(root / "sys/bus/pci/devices")):
        vendor = _VENDORS.get(read_text(folder / "vendor") or "")
        if vendor not in ("nvidia", "amd") or not (read_text(folder / "class") or "").startswith("0x03"):
            continue
        index = sum(gpu.vendor == vendor for gpu in found)
        card = _nvidia_card(root, folder, index) if vendor == "nvidia" else _amd_card(root, folder, index)
        found.append(_with_link(card, folder))
    return tuple(found)


def nvidia_driver(root: Path) -> GpuDriver | None:
    """Version and flavour of the NVIDIA kernel module; WSL has a driver without a module."""
    text = read_text(root / "proc/driver/nvidia/version")
    if text is None:
        is_wsl = (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib").exists()
        return GpuDriver(vendor="nvidia", flavour="wsl", sources={"flavour": "/dev/dxg"}) if is_wsl else None
    version = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)", text)
    flavour: Flavour = "open" if "Open Kernel Module" in text else "proprietary"
    place = "/proc/driver/nvidia/version"
    sources = {"version": place, "flavour": place}
    return GpuDriver(vendor="nvidia", version=version[1] if version else None, flavour=flavour, sources=sources)


def amd_driver(root: Path) -> GpuDriver | None:
    """The amdgpu module; it is part of the kernel, so its version is that of ROCm if that is installed."""
    if not (root / "sys/module/amdgpu").exists():
        return None
    version = read_text(root / "opt/rocm/.info/version")
    sources = {"flavour": "/sys/module/amdgpu"} | ({"version": "/opt/rocm/.info/version"} if version else {})
    return GpuDriver(vendor="amd", version=version, flavour="in-tree", sources=sources)


def _nvidia_card(root: Path, folder: Path, index: int) -> Gpu:
    name, place = _nvidia_name(root, folder)
    capability = capability_by_name(name)
    sources = {"*": "/sys/bus/pci", "name": place}
    return Gpu(
        index=index,
        vendor="nvidia",
        name=name,
        capability=capability,
        is_served=(folder / "driver").exists() and (folder / "driver").resolve().name == "nvidia",
        pci_bus_id=folder.name,
        sources=sources | ({"capability": "card name"} if capability else {}),
    )


def _nvidia_name(root: Path, folder: Path) -> tuple[str, str]:
    text = read_text(root / "proc/driver/nvidia/gpus" / folder.name / "information") or ""
    model = re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE)
    if model:
        return model[1], "/proc/driver/nvidia/gpus"
    device = (read_text(folder / "device") or "")[2:]
    name = _pci_name(root, "10de", device)
    return (name, "pci.ids") if name else (f"NVIDIA card {device}", "/sys/bus/pci")


def _amd_card(root: Path, folder: Path, index: int) -> Gpu:
    device = (read_text(folder / "device") or "")[2:]
    name = _pci_name(root, "1002", device)
    memory = read_text(folder / "mem_info_vram_total")
    capabilities = list(_amd_architectures(root))
    capability = capabilities[index] if index < len(capabilities) else None
    sources = {"*": "/sys/bus/pci"} | ({"name": "pci.ids"} if name else {})
    return Gpu(
        index=index,
        vendor="amd",
        name=name or f"AMD card {device}",
        capability=capability,
        memory_bytes=int(memory) if memory else None,
        is_served=(folder / "driver").exists(),
        pci_bus_id=folder.name,
        sources=sources | ({"capability": "/sys/class/kfd"} if capability else {}),
    )


def _amd_architectures(root: Path) -> Iterator[str]:
    """gfx names of the compute nodes; processors are nodes too, with version 0."""
    for folder in sorted(_folders(root / "sys/class/kfd/kfd/topology/nodes"), key=lambda path: int(path.name)):
        match = re.search(r"^gfx_target_version (\d+)$", read_text(folder / "properties") or "", re.MULTILINE)
        if match and int(match[1]):
            version = int(match[1])
            yield f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _with_link(gpu: Gpu, folder: Path) -> Gpu:
    return replace(
        gpu,
        pcie_generation=_generation(read_text(folder / "current_link_speed")),
        pcie_max_generation=_generation(read_text(folder / "max_link_speed")),
        pcie_width=_width(read_text(folder / "current_link_width")),
        pcie_max_width=_width(read_text(folder / "max_link_width")),
    )


def _generation(speed: str | None) -> int | None:
    return _GIGATRANSFERS.get(speed.split()[0]) if speed else None


def _width(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and text != "0" else None


def _pci_name(root: Path, vendor: str, device: str) -> str | None:
    for name in _PCI_ID_FILES:
        text = read_text(root / name)
        if text is None:
            continue
        block = re.search(rf"^{vendor}\s.*\n((?:[\t#].*\n?)*)", text, re.MULTILINE)
        match = re.search(rf"^\t{device}\s+(.+)$", block[1], re.MULTILINE) if block and device else None
        if match:
            return match[1].strip()
    return None


def _folders(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []


def read_text(path: Path) -> str | None:
    """The content of a file of the system; None if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
