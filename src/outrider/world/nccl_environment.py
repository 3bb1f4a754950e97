"""Sets up NCCL in a rank: variables before the first communicator, a check for equal versions, and shutdown.

Decides how ranks that share a GPU can use NCCL, and turns off torch's watchdogs, because the errors of our own timeouts
name what a rank waited for. Called by World.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from outrider.errors import DeviceError

# From this version on, a variable allows several ranks on one GPU; before, they must look like ranks on two hosts.
_TAKES_SHARED_GPUS = (2, 30)
# A rank that lost a peer must report it; torch's watchdog threads would end the rank first, or sleep for minutes.
_OURS_TO_END = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_ABORT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclRank:
    """The facts about NCCL that a rank exchanges when it joins."""

    device: str
    host: str
    gpu: str | None
    """The UUID of the card, independent of its index in this process."""
    nccl: str | None


def take_seat(*, device: str, host: str, gpu_index: int | None) -> NcclRank:
    if gpu_index is None:
        return NcclRank(device=device, host=host, gpu=None, nccl=None)
    properties = torch.cuda.get_device_properties(gpu_index)
    return NcclRank(device=device, host=host, gpu=str(getattr(properties, "uuid", gpu_index)), nccl=version())


def version() -> str | None:
    """The NCCL version of this torch; None if it has no NCCL."""
    return ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None


def check_versions(seats: Sequence[NcclRank]) -> None:
    """Check that all ranks have the same NCCL version; NCCL's own errors for mixed versions are unclear or missing."""
    for rank, seat in enumerate(seats):
        if seat.nccl is None:
            raise DeviceError(
                f"backend nccl cannot be used: the torch of rank {rank} has no nccl",
                hint='pass backend="cpu"',
                rank=rank,
            )
    versions = {seat.nccl for seat in seats}
    if len(versions) > 1:
        found = ", ".join(f"rank {rank} has {seat.nccl}" for rank, seat in enumerate(seats))
        raise DeviceError(
            f"backend nccl needs one version in all ranks: {found}",
            hint='use torch builds with the same nccl, or pass backend="cpu"',
        )


def variables(rank: int, seats: Sequence[NcclRank]) -> dict[str, str]:
    """The NCCL variables of this rank, except those that the user has set."""
    if not _share_gpus(seats):
        return dict(_OURS_TO_END)
    own = seats[rank]
    if _number(own.nccl or "") >= _TAKES_SHARED_GPUS:
        return _OURS_TO_END | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    # The first ranks of all GPUs look like one host, the second ranks like another, so no host has a GPU twice.
    turn = sum((seat.host, seat.gpu) == (own.host, own.gpu) for seat in seats[:rank])
    told = _OURS_TO_END | {"NCCL_HOSTID": f"outrider-{own.host}-{turn}"}
    if len({seat.host for seat in seats}) == 1:
        told |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return told


def _share_gpus(seats: Sequence[NcclRank]) -> bool:
    places = [(seat.host, seat.gpu) for seat in seats]
    return len(set(places)) < len(places)


def _number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


@contextmanager
def told(wishes: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process temporarily; variables that the user has set are not changed."""
    own = {name: value for name, value in wishes.items() if name not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)


def abort(group: dist.ProcessGroup) -> bool:
    """Abort a group whose peers may have died; false if even that does not return."""
    # Destroying a group would wait for its peers; abort does not, but it may hang in a broken driver.
    end = dist.distributed_c10d._abort_process_group
    thread = threading.Thread(target=end, args=(group,), name="outrider-nccl-abort", daemon=True)
    thread.start()
    thread.join(_ABORT_S)
    return not thread.is_alive()
