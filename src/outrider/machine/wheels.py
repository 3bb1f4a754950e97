"""The table of published torch builds, and whether code built for some architectures runs on a card.

Decides which architectures each build holds, which driver it needs, and what a card's capability is by its name. A
binary runs on the same major version with an equal or higher minor; PTX runs on anything newer; AMD code runs on its
own architecture only. Called by the verdicts and by the choice of a torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from outrider.errors import ConfigError, nearest
from outrider.machine import codec

_ARCH = re.compile(r"(?P<kind>sm|compute)_(?P<digits>\d{2,3})(?P<suffix>[af]?)")


def capability_of(capability: str) -> tuple[int, int]:
    """`12.0` as (12, 0), so that capabilities compare as numbers."""
    major, _, minor = capability.partition(".")
    return int(major), int(minor or 0)


def serving_arch(capability: str, archs: Iterable[str]) -> str | None:
    """The entry of an architecture list that runs on the card, the closest first; None if there is none."""
    if capability.startswith("gfx"):
        return capability if capability in archs else None
    candidates = [arch for arch in archs if _serves(arch, capability_of(capability))]
    return max(candidates, key=_closeness, default=None)


def sm(capability: str) -> str:
    """`6.1` as `sm_61`; AMD names stay."""
    return capability if capability.startswith("gfx") else f"sm_{capability.replace('.', '')}"


def capability_by_name(name: str) -> str | None:
    """The capability of an NVIDIA card by its market name or chip, if the driver does not report it."""
    for pattern, capability in _names():
        if re.search(pattern, name):
            return capability
    return None


def _serves(arch: str, card: tuple[int, int]) -> bool:
    match = _ARCH.fullmatch(arch)
    if match is None:
        return False
    built = _numbers(match["digits"])
    if match["kind"] == "compute":
        return built <= card
    # sm_90a and similar targets contain instructions that no other card has.
    if match["suffix"] == "a":
        return built == card
    return built[0] == card[0] and built[1] <= card[1]


def _numbers(digits: str) -> tuple[int, int]:
    return int(digits[:-1]), int(digits[-1])


def _closeness(arch: str) -> tuple[bool, tuple[int, int]]:
    match = _ARCH.fullmatch(arch)
    assert match is not None
    return match["kind"] == "sm", _numbers(match["digits"])


@cache
def _names() -> tuple[tuple[str, str], ...]:
    text = resources.files("outrider.machine").joinpath("cards.json").read_text(encoding="utf-8")
    return tuple((entry["pattern"], entry["capability"]) for entry in json.loads(text)["names"])


_COMPILERS = ("13.0", "12.9", "12.8", "12.6")
"""The last toolkits of each span of targets: newer ones serve newer cards better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    """One published build."""

    torch: str
    backend: str
    archs: tuple[str, ...]
    is_default: bool = False

    @property
    def cuda(self) -> str:
        """`12.6` for cu126."""
        return cuda_of(self.backend)


@dataclass(frozen=True, kw_only=True, slots=True)
class CondaRange:
    """The conda-forge builds, one architecture list for a range of versions."""

    first: str
    last: str
    backend: str
    archs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RocmWheel:
    """The ROCm build; its source names no torch version, so none is pinned."""

    backend: str
    archs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverNeed:
    """The oldest driver that serves a major version of CUDA."""

    cuda: str
    minimum: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleRules:
    """Which kernel module serves which cards on bare-metal Linux."""

    open_from: str
    open_only_from: str
    open_only_driver: str
    last_branch_below_open: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolkitRange:
    """What the compiler of a CUDA toolkit can target, from this version on."""

    cuda: str
    first: str
    last: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CudnnDrop:
    """The cuDNN that has no code for older cards any more."""

    version: str
    below: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelTable:
    """Everything in wheels.json."""

    schema_version: int
    date: str
    sources: tuple[str, ...]
    platform: str
    preferred: str
    minimum: str
    wheels: tuple[Wheel, ...]
    conda: CondaRange
    rocm: RocmWheel
    drivers: tuple[DriverNeed, ...]
    modules: ModuleRules
    toolkits: tuple[ToolkitRange, ...]
    triton_from: str
    cudnn_drop: CudnnDrop

    def versions(self) -> tuple[str, ...]:
        """Torch versions that Outrider runs on: the preferred one first, then the newest."""
        usable = {wheel.torch for wheel in self.wheels if version_of(wheel.torch) >= version_of(self.minimum)}
        return tuple(sorted(usable, key=lambda name: (name == self.preferred, version_of(name)), reverse=True))

    def of_version(self, torch: str) -> tuple[Wheel, ...]:
        """The wheels of one torch version, the default of the index first, then the newest CUDA."""
        found = [wheel for wheel in self.wheels if wheel.torch == torch]
        return tuple(sorted(found, key=lambda wheel: (wheel.is_default, version_of(wheel.cuda)), reverse=True))

    def minimum_driver(self, cuda: str) -> str:
        """The oldest driver for a CUDA version."""
        major = cuda.partition(".")[0]
        return next(need.minimum for need in self.drivers if need.cuda == major)

    def compilers(self, capabilities: tuple[str, ...]) -> tuple[str, ...]:
        """CUDA toolkits that can compile for all these cards, the newest first."""
        return tuple(cuda for cuda in _COMPILERS if all(self.targets(cuda, item) for item in capabilities))

    def targets(self, cuda: str, capability: str) -> bool:
        """Whether the compiler of this CUDA toolkit can target the card."""
        older = [entry for entry in self.toolkits if version_of(entry.cuda) <= version_of(cuda)]
        if not older:
            return False
        newest = max(older, key=lambda entry: version_of(entry.cuda))
        return capability_of(newest.first) <= capability_of(capability) <= capability_of(newest.last)


@cache
def load_table() -> WheelTable:
    """The table that ships with this version."""
    text = resources.files("outrider.machine").joinpath("wheels.json").read_text(encoding="utf-8")
    data = json.loads(text)
    lists = data.pop("arch_lists")
    for entry in (*data["wheels"], data["conda"], data["rocm"]):
        _name_archs(entry, lists)
    return codec.decode(WheelTable, data, where="wheels.json")


def version_of(text: str) -> tuple[int, ...]:
    """`580.65.06` or `2.13.0+cu130` as numbers that compare."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0]))


def release_of(version: str) -> str:
    """`2.13` of `2.13.0+cu130`."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def cuda_of(backend: str) -> str:
    """`12.6` of cu126 or conda-cu126; empty if the backend is not CUDA."""
    match = re.search(r"cu(\d+)(\d)$", backend)
    return f"{match[1]}.{match[2]}" if match else ""


def _name_archs(entry: dict[str, Any], lists: dict[str, list[str]]) -> None:
    entry["archs"] = lists[entry["archs"]]


def check_version(version: str, table: WheelTable) -> str:
    """A torch version that the user wrote, if it is one that Outrider runs on and the table knows."""
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", version):
        raise ConfigError(f"a torch version looks like 2.13 or 2.13.0, got {version!r}", hint=_known_versions(table))
    if version_of(version) < version_of(table.minimum):
        raise ConfigError(f"outrider needs torch {table.minimum} or newer, got {version}", hint=_known_versions(table))
    if release_of(version) not in table.versions():
        raise ConfigError(f"torch {version} is not in the wheel table of {table.date}", hint=_known_versions(table))
    return version


def check_backend(backend: str, version: str, table: WheelTable) -> str:
    """A backend that the user wrote, if there is such a build of this torch version."""
    known = ["cpu", table.rocm.backend, *(wheel.backend for wheel in table.of_version(release_of(version)))]
    if backend not in known:
        # Another CUDA version is another build, not a slip of the pen.
        close = None if cuda_of(backend) else nearest(backend, known)
        guess = f"did you mean {close}? " if close else ""
        raise ConfigError(
            f"there is no {backend} build of torch {version}", hint=f"{guess}there are {', '.join(known)}, or auto"
        )
    return backend


def _known_versions(table: WheelTable) -> str:
    newest_first = sorted(table.versions(), key=version_of, reverse=True)
    return f"known versions: {', '.join(newest_first)}"


def table_difference(table: WheelTable, *, torch: str, backend: str, archs: tuple[str, ...]) -> str | None:
    """The difference between an installed build and the table; None if they agree or the table has no entry."""
    entries = [wheel for wheel in table.wheels if (wheel.torch, wheel.backend) == (release_of(torch), backend)]
    if not entries or set(entries[0].archs) == set(archs):
        return None
    more = [arch for arch in archs if arch not in entries[0].archs]
    less = [arch for arch in entries[0].archs if arch not in archs]
    parts = [f"holds {' '.join(more)}" if more else "", f"lacks {' '.join(less)}" if less else ""]
    return f"differs from the wheel table of {table.date}: {', '.join(filter(None, parts))}"
