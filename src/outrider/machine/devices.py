"""Decides which device each rank gets, and how many threads, from the user's option and the devices of the machine.

Opens no device and imports no torch; whether a device works is found when its rank joins the world. Called by `api`
and the command line, and by the launcher for threads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, DeviceError, nearest
from outrider.machine.memory_size import memory_text, parse_memory

KINDS = ("cuda", "cpu", "xpu", "mps")
_INDEXED_KINDS = ("cuda", "xpu")
_OTHER_NAMES = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "amd": "cuda", "metal": "mps"}
"""What users call kinds of devices that torch calls otherwise; torch's name for AMD's GPUs is cuda too."""
_SPEC = re.compile(
    r"(?P<kind>[^:@%]*)(:(?P<index>[^:@%]*))?(@(?P<speed>[^:%]*))?(%(?P<share>[^:]*))?(:(?P<memory>.*))?"
)
_MEMORY_EXAMPLE = "cuda:0:8GiB and cpu:512MiB are limits of memory"
_EXAMPLES = "devices look like cuda:0, cpu, cpu@0.4 or cuda:0%30"

CARD_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Makes CUDA number the cards as NVML and nvidia-smi do; by itself it puts the fastest first."""

# Builds of torch with mimalloc (aarch64) reserve 1 GiB at the first tensor, and the kernel's limit counts it as used.
HOST_LIMIT_VARIABLES = {"MIMALLOC_DISALLOW_ARENA_ALLOC": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """Where a rank computes."""

    kind: str
    index: int | None = None
    speed: float = 1.0
    """Fraction of its full speed; below 1 the rank is throttled."""
    share: int | None = None
    """Percent of the multiprocessors, for an MPS slice of a CUDA device."""
    memory_bytes: int | None = None
    """The memory that the rank may use; None for all that there is."""

    def __post_init__(self) -> None:
        _check_kind(self)
        _check_speed(self)
        _check_share(self)
        _check_memory(self)

    def __str__(self) -> str:
        speed = "" if self.speed == 1.0 else f"@{self.speed:g}"
        share = "" if self.share is None else f"%{self.share}"
        memory = "" if self.memory_bytes is None else f":{memory_text(self.memory_bytes)}"
        return f"{self.torch_name}{speed}{share}{memory}"

    @property
    def torch_name(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


def _check_kind(spec: DeviceSpec) -> None:
    if spec.kind not in KINDS:
        close = _OTHER_NAMES.get(spec.kind.lower()) or nearest(spec.kind.lower(), KINDS)
        guess = f"did you mean {close}? " if close else ""
        raise ConfigError(f"unknown device kind {spec.kind!r}", hint=f"{guess}kinds are {', '.join(KINDS)}")
    if spec.index is not None and spec.kind not in _INDEXED_KINDS:
        raise ConfigError(f"{spec.kind} takes no number, got {spec.kind}:{spec.index}", hint=f"write {spec.kind}")
    if spec.index is not None and spec.index < 0:
        raise ConfigError(f"the number of a device must be 0 or more, got {spec.kind}:{spec.index}", hint=_EXAMPLES)


def _check_speed(spec: DeviceSpec) -> None:
    if not 0 < spec.speed <= 1:
        raise ConfigError(
            f"the speed of a device must be in (0, 1], got {spec.kind}@{spec.speed:g}",
            hint="cpu@0.4 is a CPU rank at 40 % of its speed",
        )
    if spec.speed < 1 and spec.kind != "cpu":
        raise ConfigError(
            f"only cpu can be throttled, got {spec.torch_name}@{spec.speed:g}",
            hint="take a slice of a CUDA device instead, as in cuda:0%40",
        )


def _check_share(spec: DeviceSpec) -> None:
    if spec.share is None:
        return
    if spec.kind != "cuda":
        raise ConfigError(
            f"only cuda can be sliced, got {spec.torch_name}%{spec.share}",
            hint="throttle a CPU rank instead, as in cpu@0.4",
        )
    if not 1 <= spec.share <= 100:
        raise ConfigError(
            f"the share of a device must be 1 to 100 percent, got {spec.torch_name}%{spec.share}",
            hint="cuda:0%30 is 30 % of the multiprocessors of cuda:0",
        )


def _check_memory(spec: DeviceSpec) -> None:
    if spec.memory_bytes is None:
        return
    if spec.kind not in ("cuda", "cpu"):
        raise ConfigError(
            f"the memory of {spec.kind} devices cannot be limited, got {spec}", hint=f"write {spec.torch_name}"
        )
    if spec.memory_bytes < 1:
        raise ConfigError(f"the memory of a device must be more than 0, got {spec}", hint=_MEMORY_EXAMPLE)


def parse_devices(text: str | Sequence[str]) -> tuple[DeviceSpec, ...]:
    """The devices of a comma list or of a sequence of names, one per rank."""
    names = text.split(",") if isinstance(text, str) else list(text)
    if not any(name.strip() for name in names):
        raise ConfigError("devices is empty", hint=f'pass devices="auto", or name them; {_EXAMPLES}')
    return tuple(_parse_device(name.strip()) for name in names)


def _parse_device(name: str) -> DeviceSpec:
    if name == "auto":
        raise ConfigError("auto cannot stand beside other devices", hint='pass devices="auto" alone')
    match = _SPEC.fullmatch(name)
    if match is None or not match["kind"]:
        raise ConfigError(f"{name!r} is no device", hint=_EXAMPLES)
    number, memory = match["index"], match["memory"]
    if number is not None and memory is None and parse_memory(number) is not None:
        number, memory = None, number  # cpu:4GiB and cuda:8GiB have no number
    index = _number(int, number, name=name, part="number")
    # As in torch, "cuda" is the first one.
    if index is None and match["kind"] in _INDEXED_KINDS:
        index = 0
    speed = _number(float, match["speed"], name=name, part="speed")
    share = _number(int, match["share"], name=name, part="share")
    return DeviceSpec(
        kind=match["kind"],
        index=index,
        speed=1.0 if speed is None else speed,
        share=share,
        memory_bytes=_memory(memory, name=name),
    )


def _memory(text: str | None, *, name: str) -> int | None:
    if text is None:
        return None
    num_bytes = parse_memory(text)
    if num_bytes is None:
        raise ConfigError(f"the memory of device {name!r} is no size: {text!r}", hint=_MEMORY_EXAMPLE)
    return num_bytes


def _number(convert: type[Any], text: str | None, *, name: str, part: str) -> Any:
    if text is None:
        return None
    try:
        return convert(text)
    except ValueError:
        raise ConfigError(f"the {part} of device {name!r} is no number: {text!r}", hint=_EXAMPLES) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """One device per rank, and why these."""

    devices: tuple[DeviceSpec, ...]
    reason: str


def resolve_devices(
    devices: str | Sequence[str] | Sequence[DeviceSpec],
    *,
    cuda_devices: Sequence[str],
    source: str = "NVML",
) -> Resolved:
    """The devices of the ranks; "auto" takes all CUDA devices, or else one CPU rank.

    `cuda_devices` are those that are there, as `source` tells.
    """
    if devices == "auto":
        return _choose_devices(cuda_devices, source=source)
    specs = _as_specs(devices)
    _check_cuda_devices_exist(specs, cuda_devices, source=source)
    return Resolved(devices=specs, reason="asked for")


def _as_specs(devices: str | Sequence[str] | Sequence[DeviceSpec]) -> tuple[DeviceSpec, ...]:
    if isinstance(devices, str):
        return parse_devices(devices)
    return parse_devices([str(device) for device in devices])


def _choose_devices(cuda_devices: Sequence[str], *, source: str) -> Resolved:
    if cuda_devices:
        found = _count(len(cuda_devices))
        return Resolved(devices=parse_devices(cuda_devices), reason=f"auto: {found} found by {source}")
    return Resolved(devices=parse_devices("cpu"), reason=f"auto: no CUDA device found by {source}")


def _check_cuda_devices_exist(specs: Sequence[DeviceSpec], cuda_devices: Sequence[str], *, source: str) -> None:
    asked = sorted({spec.torch_name for spec in specs if spec.kind == "cuda"})
    missing = [name for name in asked if name not in cuda_devices]
    if not missing:
        return
    found = ", ".join([*cuda_devices, f"by {source}"])
    if len(asked) > len(cuda_devices):
        message = f"{_count(len(asked))} asked for, {len(cuda_devices)} found ({found})"
    else:
        message = f"{', '.join(missing)} asked for, {_count(len(cuda_devices))} found ({found})"
    way_out = ",".join("cpu" if spec.torch_name in missing else str(spec) for spec in specs)
    raise DeviceError(message, hint=f'run `outrider diagnose`, or pass devices="{way_out}"')


def _count(num_devices: int) -> str:
    return f"{num_devices} CUDA device{'' if num_devices == 1 else 's'}"


def cuda_devices(variables: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The CUDA devices that a rank would see, by NVML; none if NVML or its driver is missing."""
    return tuple(f"cuda:{index}" for index, _ in enumerate(visible_cards(variables)))


def visible_cards(variables: Mapping[str, str] = os.environ) -> tuple[int | None, ...]:
    """NVML's number of each CUDA device that a process would see, in CUDA's order; None for a MIG slice."""
    uuids, variable = _uuids(), variables.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return tuple(range(len(uuids)))
    # CUDA shows those named up to the first that is not there.
    names = takewhile(partial(_is_there, uuids), (name.strip() for name in variable.split(",")))
    return tuple(_card_called(name, uuids) for name in names)


def _uuids() -> list[str]:
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _is_there(uuids: Sequence[str], name: str) -> bool:
    if name.isdecimal():
        return int(name) < len(uuids)
    # Slices of a card by MIG have names of their own; CUDA takes them where there is any card.
    return (name.startswith("MIG-") and bool(uuids)) or (bool(name) and any(uuid.startswith(name) for uuid in uuids))


def _card_called(name: str, uuids: Sequence[str]) -> int | None:
    if name.isdecimal():
        return int(name)
    return next((index for index, uuid in enumerate(uuids) if uuid.startswith(name)), None)


def threads_per_rank(specs: Sequence[DeviceSpec], num_cores: int) -> tuple[int, ...]:
    """Threads for each rank of one host, so that ranks do not fight for cores.

    Beside CPU ranks an accelerator's rank gets one core, enough to feed its device; without them they share all cores.
    What does not divide stays idle, so that equal devices stay equally fast. A throttled rank gets as many
    threads as any other CPU rank: its speed is a fraction of theirs.
    """
    num_cpu_ranks = sum(spec.kind == "cpu" for spec in specs)
    if num_cpu_ranks == 0:
        return tuple(max(1, num_cores // len(specs)) for _ in specs)
    num_left = num_cores - (len(specs) - num_cpu_ranks)
    return tuple(max(1, num_left // num_cpu_ranks) if spec.kind == "cpu" else 1 for spec in specs)


def threads_alone(specs: Sequence[DeviceSpec], num_cores: int) -> tuple[int, ...]:
    """Threads for each rank of one host while all others rest: a CPU rank then has the cores of the other CPU ranks."""
    num_left = num_cores - sum(spec.kind != "cpu" for spec in specs)
    beside_others = threads_per_rank(specs, num_cores)
    return tuple(
        max(1, num_left) if spec.kind == "cpu" else own for spec, own in zip(specs, beside_others, strict=True)
    )


def num_cores() -> int:
    """Cores that this process may use: physical ones, within its affinity and the quota of its container."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical, _container_quota(Path("/sys/fs/cgroup/cpu.max")) or allowed))


def _container_quota(path: Path) -> int | None:
    """Whole cores of a control group's quota, as Linux writes it: microseconds, and the period they are meant for."""
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) // int(period)


def variables_for_limits(devices: Sequence[DeviceSpec]) -> dict[str, str]:
    """Variables of ranks, for the limits of these devices to count."""
    is_limited = any(spec.kind != "cuda" and spec.memory_bytes is not None for spec in devices)
    return dict(HOST_LIMIT_VARIABLES) if is_limited else {}
