"""Gathers the facts of this machine: NVML first, /proc and /sys for what it does not tell.

Measures nothing and judges nothing. Called by diagnose, setup and torch; `root` is the file system to read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outrider.machine import bus, host, nvml, tools, torches
from outrider.machine.facts import Driver, Facts, Gpu

ROOT = Path("/")


def detect(folder: Path, *, variants: dict[str, Path], root: Path = ROOT) -> Facts:
    """All facts of this machine; `variants` are torch environments by name, the active one first."""
    machine = detect_machine(folder, root=root)
    return replace(machine, torches=torches.find_torches(folder, variants))


def detect_machine(folder: Path, *, root: Path = ROOT) -> Facts:
    """The facts of this machine without the torch builds, which take seconds to ask."""
    reading = nvml.read_nvml()
    on_bus = bus.cards_on_bus(root)
    return Facts(
        host=host.read_host(root),
        cpu=host.read_cpu(root),
        memory=host.read_memory(root),
        disk=host.read_disk(folder),
        drivers=tuple(_drivers(reading.driver, root)),
        gpus=merge_cards(reading.gpus, on_bus),
        links=reading.links,
        toolkits=tools.find_toolkits(root),
        libraries=tools.find_nccl(root),
        docker=tools.find_docker(),
        interfaces=host.read_interfaces(),
        troubles=(reading.trouble,) if reading.trouble else (),
    )


def merge_cards(told: tuple[Gpu, ...], on_bus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """NVML's cards, then those on the bus that it does not know; an NVIDIA card it leaves out is not served."""
    known = {gpu.pci_bus_id for gpu in told}
    others = [gpu for gpu in on_bus if gpu.pci_bus_id not in known]
    if told:
        others = [_unserved(gpu, index) for index, gpu in enumerate(others, start=len(told))]
    return told + tuple(others)


def _unserved(gpu: Gpu, index: int) -> Gpu:
    return replace(gpu, index=index, is_served=False) if gpu.vendor == "nvidia" else gpu


def _drivers(told: Driver | None, root: Path) -> list[Driver]:
    module = bus.nvidia_driver(root)
    found = []
    if told or module:
        nvidia = told or Driver(vendor="nvidia", version=module.version if module else None)
        sources = {**(module.sources if module else {}), **nvidia.sources, "is_mps_running": "process list"}
        flavour = module.flavour if module else None
        found.append(replace(nvidia, flavour=flavour, is_mps_running=tools.is_mps_running(), sources=sources))
    amd = bus.amd_driver(root)
    return [*found, amd] if amd else found
