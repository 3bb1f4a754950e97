"""Gathers the facts of this machine: NVML first, /proc and /sys for what it does not tell.

Measures nothing and judges nothing. Called by diagnose, setup and torch; `root` is the file system to read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from outrider.machine import bus, host, nvml, tools, torches
from outrider.machine.devices import visible_cards
from outrider.machine.facts import Driver, Facts, Gpu, PeerLink

ROOT = Path("/")


def detect(folder: Path, *, variants: dict[str, Path], root: Path = ROOT) -> Facts:
    """All facts of this machine; `variants` are torch environments by name, the active one first."""
    machine = detect_machine(folder, root=root)
    return replace(machine, torches=torches.find_torches(folder, variants))


def detect_machine(folder: Path, *, root: Path = ROOT) -> Facts:
    """The facts of this machine without the torch builds, which take seconds to ask."""
    reading = nvml.read_nvml()
    cards = merge_cards(reading.gpus, bus.cards_on_bus(root))
    order = visible_cards() if "CUDA_VISIBLE_DEVICES" in os.environ and reading.gpus else None
    gpus = cards if order is None else only_visible(cards, order)
    return Facts(
        host=host.read_host(root),
        cpu=host.read_cpu(root),
        memory=host.read_memory(root),
        disk=host.read_disk(folder),
        drivers=tuple(_drivers(reading.driver, root)),
        gpus=gpus,
        num_hidden=len(cards) - len(gpus),
        links=reading.links if order is None else _links_between(order, reading.links),
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
