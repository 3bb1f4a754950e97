"""Limits a rank to the memory that its device spec allows, so that a large device can stand in for a small one.

On a CUDA device the limit applies to torch's allocator; the CUDA context and the libraries of collectives need extra
memory. On a CPU the Linux kernel enforces the limit, which counts only memory allocated after the start of the process.
Called by World when a rank opens its device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from outrider.errors import DeviceError
from outrider.machine.devices import HOST_LIMIT_VARIABLES, DeviceSpec
from outrider.machine.memory_size import memory_text

_TOLERANCE_BYTES = 64 * 2**20


def limit_memory(spec: DeviceSpec, *, rank: int) -> Callable[[], None]:
    """Set the limit, if the spec has one; returns a function that lifts it."""
    if spec.memory_bytes is None:
        return lambda: None
    return _limit_cuda(spec, rank=rank) if spec.kind == "cuda" else _limit_host(spec, rank=rank)


def _limit_cuda(spec: DeviceSpec, *, rank: int) -> Callable[[], None]:
    assert spec.memory_bytes is not None
    _, total_bytes = torch.cuda.mem_get_info(spec.torch_name)
    if spec.memory_bytes > total_bytes:
        raise _too_much(spec, total_bytes, rank=rank)
    torch.cuda.set_per_process_memory_fraction(spec.memory_bytes / total_bytes, spec.torch_name)
    return lambda: torch.cuda.set_per_process_memory_fraction(1.0, spec.torch_name)


def _limit_host(spec: DeviceSpec, *, rank: int) -> Callable[[], None]:
    assert spec.memory_bytes is not None
    if sys.platform != "linux":
        raise DeviceError(
            f"rank {rank} is to use {spec}, but memory of a CPU rank can be limited on Linux only",
            hint=f"leave the limit out, or use ulimit in the shell: devices={spec.torch_name!r}",
            rank=rank,
        )
    import resource

    total_bytes = _number_in("/proc/meminfo", "MemTotal")
    if spec.memory_bytes > total_bytes:
        raise _too_much(spec, total_bytes, rank=rank)
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # Do not count the interpreter and torch, whose sizes differ between versions.
    allowed = _number_in("/proc/self/status", "VmData") + spec.memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))

    def lift() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))

    if _fits(spec.memory_bytes + _TOLERANCE_BYTES):
        lift()
        (variable,) = HOST_LIMIT_VARIABLES
        raise DeviceError(
            f"rank {rank} is to use {spec}, but this build of torch has more than that in reserve, "
            "where no limit counts",
            hint=f"start Python with {variable}=1 in its environment, or leave the limit out",
            rank=rank,
        )
    return lift


def _fits(num_bytes: int) -> bool:
    """Whether this many bytes can be allocated; they are not written to, so no physical memory is used."""
    try:
        torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError:
        return False
    return True


def available_memory(spec: DeviceSpec) -> int | None:
    """Bytes that this rank can still allocate on its device; None if that is not known.

    Without a limit, other processes can take the same memory.
    """
    if spec.kind == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(spec.torch_name)
        allocated = torch.cuda.memory_allocated(spec.torch_name)
        if spec.memory_bytes is not None:
            return max(0, spec.memory_bytes - allocated)
        # Memory that torch's allocator holds in reserve is free for torch.
        return free_bytes + torch.cuda.memory_reserved(spec.torch_name) - allocated
    if spec.kind != "cpu":
        return None
    if spec.memory_bytes is not None and sys.platform == "linux":
        import resource

        allowed, _ = resource.getrlimit(resource.RLIMIT_DATA)
        return max(0, allowed - _number_in("/proc/self/status", "VmData"))
    import psutil

    return int(psutil.virtual_memory().available + psutil.swap_memory().free)


def _number_in(path: str, name: str) -> int:
    """Bytes, from a line such as `MemTotal:  16384 kB`."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{path} has no {name}")


def _too_much(spec: DeviceSpec, total_bytes: int, *, rank: int) -> DeviceError:
    assert spec.memory_bytes is not None
    return DeviceError(
        f"rank {rank} is to use {memory_text(spec.memory_bytes)} of {spec.torch_name}, which has "
        f"{total_bytes / 2**30:.1f} GiB",
        hint="lower the limit, or leave it out",
        rank=rank,
    )
