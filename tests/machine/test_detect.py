"""The facts of the machine that runs the tests, and how readings are put together."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path

import pytest

from outrider.machine import codec
from outrider.machine.detect import (
    detect_machine,
    find_docker,
    find_nccl,
    find_toolkits,
    merge_cards,
    only_visible,
    read_cpu,
    read_host,
)
from outrider.machine.machine_facts import Gpu


def card(index: int, bus_id: str, **more: object) -> Gpu:
    values: dict[str, object] = {"vendor": "nvidia", "name": f"card at {bus_id}", **more}
    return Gpu(index=index, pci_bus_id=bus_id, **values)  # type: ignore[arg-type]


def test_this_machine_can_be_looked_at_whatever_it_has(tmp_path: Path) -> None:
    facts = detect_machine(tmp_path)
    assert facts.host.system
    assert facts.cpu.threads
    assert facts.memory.total_bytes
    assert facts.disk.free_bytes
    assert facts.interfaces


def test_facts_say_where_they_came_from(tmp_path: Path) -> None:
    facts = detect_machine(tmp_path)
    assert facts.memory.sources["total_bytes"] == "psutil"
    assert facts.disk.sources["free_bytes"] == "statvfs"


def test_facts_name_no_host_and_no_user(tmp_path: Path) -> None:
    text = json.dumps(codec.encode(detect_machine(tmp_path)))
    words = set(text.replace('"', " ").replace("/", " ").replace(",", " ").split())
    assert socket.gethostname() not in words
    assert getpass.getuser() not in words - {"root"}


def test_a_card_that_nvml_knows_is_taken_from_nvml() -> None:
    told = card(0, "0000:01:00.0", name="NVIDIA H200")
    assert merge_cards((told,), (card(0, "0000:01:00.0"),)) == (told,)


def test_a_card_that_nvml_leaves_out_is_not_served_and_numbered_after() -> None:
    told = card(0, "0000:02:00.0")
    _, other = merge_cards((told,), (card(0, "0000:01:00.0"), card(1, "0000:02:00.0")))
    assert (other.index, other.pci_bus_id, other.is_served) == (1, "0000:01:00.0", False)


def test_without_nvml_the_bus_is_taken_as_it_is() -> None:
    on_bus = (card(0, "0000:01:00.0"), card(0, "0000:03:00.0", vendor="amd"))
    assert merge_cards((), on_bus) == on_bus


def test_visible_cards_are_numbered_as_cuda_does() -> None:
    first, second, amd = card(0, "0000:01:00.0"), card(1, "0000:02:00.0"), card(0, "0000:03:00.0", vendor="amd")
    shown = only_visible((first, second, amd), (1,))
    assert [(gpu.index, gpu.pci_bus_id) for gpu in shown] == [(0, "0000:02:00.0"), (0, "0000:03:00.0")]


def test_a_card_without_driver_is_not_hidden_by_what_cuda_shows() -> None:
    served, lost = card(0, "0000:01:00.0"), card(1, "0000:02:00.0", is_served=False)
    assert only_visible((served, lost), (0,)) == (served, lost)


def test_a_mig_slice_leaves_its_card_in_sight() -> None:
    cards = (card(0, "0000:01:00.0"),)
    assert only_visible(cards, (None,)) == cards


def test_an_arm_processor_is_named_by_its_numbers(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n")
    assert read_cpu(tmp_path).model == "ARM implementer 0x41 part 0xd0c"


def test_a_container_is_known_by_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (tmp_path / ".dockerenv").touch()
    assert read_host(tmp_path).container == "docker"


def test_bare_metal_is_no_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "SINGULARITY_CONTAINER", "APPTAINER_CONTAINER"):
        monkeypatch.delenv(name, raising=False)
    assert read_host(tmp_path).container is None


def test_the_distribution_is_read(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text('NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n')
    assert read_host(tmp_path).distribution == "Debian GNU/Linux 12 (bookworm)"


def test_wsl_is_known_by_its_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    assert read_host(tmp_path).is_wsl is True


def test_a_toolkit_is_asked_for_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    compiler = tmp_path / "usr/local/cuda-12.9/bin/nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text('#!/bin/sh\necho "Cuda compilation tools, release 12.9, V12.9.86"\n')
    compiler.chmod(0o755)
    assert [toolkit.version for toolkit in find_toolkits(tmp_path)] == ["12.9"]


def test_a_compiler_on_path_that_wraps_a_known_toolkit_is_not_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    for folder in ("usr/local/cuda-12.9/bin", "usr/local/bin"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "nvcc").write_text('#!/bin/sh\necho "Cuda compilation tools, release 12.9, V12.9.86"\n')
        (tmp_path / folder / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/usr/local/bin:/usr/bin:/bin")
    assert [toolkit.path for toolkit in find_toolkits(tmp_path)] == [f"{tmp_path}/usr/local/cuda-12.9"]


def test_nccl_on_the_system_is_found_with_its_version(tmp_path: Path) -> None:
    folder = tmp_path / "usr/lib/x86_64-linux-gnu"
    folder.mkdir(parents=True)
    (folder / "libnccl.so.2.28.3").touch()
    (folder / "libnccl.so.2").symlink_to("libnccl.so.2.28.3")
    assert [library.version for library in find_nccl(tmp_path)] == ["2.28.3"]


def test_no_docker_is_a_normal_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_docker() is None
