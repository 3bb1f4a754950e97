"""Cards and drivers from /proc and /sys, read from trees that stand in for machines."""

from __future__ import annotations

from pathlib import Path

from outrider.machine.bus import amd_driver, cards_on_bus, nvidia_driver

PCI_IDS = """\
1002  Advanced Micro Devices, Inc. [AMD/ATI]
\t744c  Navi 31 [Radeon RX 7900 XTX]
10de  NVIDIA Corporation
\t1c03  GP106 [GeForce GTX 1060 6GB]
\t\t1043 85b6  a board of one maker
8086  Intel Corporation
"""


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def card(bus_id: str, *, vendor: str, device: str, kind: str = "0x030000") -> dict[str, str]:
    folder = f"sys/bus/pci/devices/{bus_id}"
    return {f"{folder}/vendor": vendor, f"{folder}/device": device, f"{folder}/class": kind}


def bind(root: Path, bus_id: str, driver: str) -> None:
    target = root / "sys/bus/pci/drivers" / driver
    target.mkdir(parents=True, exist_ok=True)
    (root / "sys/bus/pci/devices" / bus_id / "driver").symlink_to(target)


def test_a_machine_without_cards_has_none(tmp_path: Path) -> None:
    assert cards_on_bus(tmp_path) == ()
    assert nvidia_driver(tmp_path) is None
    assert amd_driver(tmp_path) is None


def test_only_display_cards_are_taken(tmp_path: Path) -> None:
    write(tmp_path, card("0000:01:00.1", vendor="0x10de", device="0x10f1", kind="0x040300"))
    assert cards_on_bus(tmp_path) == ()


def test_an_nvidia_card_without_its_driver_is_known_by_its_chip(tmp_path: Path) -> None:
    write(tmp_path, card("0000:02:00.0", vendor="0x10de", device="0x1c03") | {"usr/share/misc/pci.ids": PCI_IDS})
    bind(tmp_path, "0000:02:00.0", "nouveau")
    (found,) = cards_on_bus(tmp_path)
    assert (found.name, found.capability, found.is_served) == ("GP106 [GeForce GTX 1060 6GB]", "6.1", False)
    assert found.sources == {"*": "/sys/bus/pci", "name": "pci.ids", "capability": "card name"}


def test_an_nvidia_card_with_its_driver_is_known_by_its_model(tmp_path: Path) -> None:
    model = {"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA GeForce RTX 3090\nIRQ: 41"}
    write(tmp_path, card("0000:01:00.0", vendor="0x10de", device="0x2204") | model)
    bind(tmp_path, "0000:01:00.0", "nvidia")
    (found,) = cards_on_bus(tmp_path)
    assert (found.name, found.capability, found.is_served) == ("NVIDIA GeForce RTX 3090", "8.6", True)


def test_a_card_that_nothing_names_keeps_its_number(tmp_path: Path) -> None:
    write(tmp_path, card("0000:01:00.0", vendor="0x10de", device="0x9999"))
    (found,) = cards_on_bus(tmp_path)
    assert (found.name, found.capability) == ("NVIDIA card 9999", None)


def test_the_pcie_link_is_read(tmp_path: Path) -> None:
    folder = "sys/bus/pci/devices/0000:01:00.0"
    link = {
        f"{folder}/current_link_speed": "8.0 GT/s PCIe",
        f"{folder}/max_link_speed": "16.0 GT/s PCIe",
        f"{folder}/current_link_width": "4",
        f"{folder}/max_link_width": "16",
    }
    write(tmp_path, card("0000:01:00.0", vendor="0x10de", device="0x2204") | link)
    (found,) = cards_on_bus(tmp_path)
    assert (found.pcie_generation, found.pcie_max_generation) == (3, 4)
    assert (found.pcie_width, found.pcie_max_width) == (4, 16)


def test_amd_cards_are_read_with_memory_and_architecture(tmp_path: Path) -> None:
    nodes = "sys/class/kfd/kfd/topology/nodes"
    files = {
        "usr/share/misc/pci.ids": PCI_IDS,
        f"{nodes}/0/properties": "cpu_cores_count 16\ngfx_target_version 0",
        f"{nodes}/1/properties": "simd_count 192\ngfx_target_version 110000",
        f"{nodes}/2/properties": "simd_count 440\ngfx_target_version 90010",
        "sys/bus/pci/devices/0000:03:00.0/mem_info_vram_total": "25753026560",
    }
    first = card("0000:03:00.0", vendor="0x1002", device="0x744c")
    second = card("0000:0a:00.0", vendor="0x1002", device="0x740f", kind="0x038000")
    write(tmp_path, files | first | second)
    one, other = cards_on_bus(tmp_path)
    assert (one.name, one.capability, one.memory_bytes) == ("Navi 31 [Radeon RX 7900 XTX]", "gfx1100", 25753026560)
    assert (other.index, other.name, other.capability) == (1, "AMD card 740f", "gfx90a")


def test_the_open_kernel_module_is_told_apart(tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build"
    write(tmp_path, {"proc/driver/nvidia/version": text})
    driver = nvidia_driver(tmp_path)
    assert driver is not None
    assert (driver.version, driver.flavour) == ("580.159.04", "open")


def test_the_proprietary_kernel_module_is_told_apart(tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue Apr  8 12:41:17 UTC 2025"
    write(tmp_path, {"proc/driver/nvidia/version": text})
    driver = nvidia_driver(tmp_path)
    assert driver is not None
    assert (driver.version, driver.flavour) == ("550.163.01", "proprietary")


def test_wsl_has_a_driver_without_a_module(tmp_path: Path) -> None:
    write(tmp_path, {"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""})
    driver = nvidia_driver(tmp_path)
    assert driver is not None
    assert (driver.version, driver.flavour) == (None, "wsl")


def test_the_amd_driver_is_known_by_its_module(tmp_path: Path) -> None:
    write(tmp_path, {"sys/module/amdgpu/initstate": "live", "opt/rocm/.info/version": "7.2.0"})
    driver = amd_driver(tmp_path)
    assert driver is not None
    assert (driver.version, driver.flavour) == ("7.2.0", "in-tree")
