"""The table of backends, which carry averages between ranks: how each is opened, and when and why it is chosen.

Decides the backend for given devices. All code that depends on a backend reads its row in the table. Users can pass
their own `BackendSpec` to `backend=`. Called by `train()`, `Session` and the benchmarks; the world opens the backend.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch.distributed as dist

from outrider.average.transport.collective import GroupCollective, Peer, RankCollective
from outrider.average.transport.shared_memory import NoSharedMemory
from outrider.average.transport.shared_memory_sums import SharedMemoryCollective
from outrider.errors import ConfigError, DeviceError, nearest
from outrider.machine.devices import DeviceSpec

BackendName = Literal["auto", "cpu", "nccl"]
"""For editors and type checkers, which cannot read the table."""
AUTO = "auto"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class ExchangeJson(Protocol):
    """Gathers a JSON value from all ranks, in rank order; every rank calls it."""

    def __call__(self, value: Any, *, name: str) -> list[Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveContext:
    """The arguments with which a backend opens a collective; every rank opens it at the same time."""

    rank: int
    world_size: int
    hosts: tuple[str, ...]
    """The host of each rank."""
    what: str
    """The data that will be sent, for error messages."""
    timeout_s: float
    exchange_json: ExchangeJson
    """Gathers through the store; meant for addresses, not for tensors."""
    new_group: Callable[[str], dist.ProcessGroup]
    """Creates a process group of all ranks: `cpu` for Gloo, `nccl` for NCCL."""
    peers: tuple[Peer, ...]
    """The hosts and addresses of the ranks, if they are on several hosts."""
    private_folder: str | None
    """A folder that is removed at the end of the run even if this rank is killed; None if there is none."""
    at_end: Callable[[Callable[[], object]], object]
    """Registers a function to be called when the rank leaves the world."""


def _no_obstacle(specs: Sequence[DeviceSpec]) -> str | None:
    return None


def _no_drawback(specs: Sequence[DeviceSpec], hosts: Sequence[str]) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    """A backend, which carries averages between ranks."""

    name: str
    """The name in records."""
    open: Callable[[CollectiveContext], RankCollective]
    summary: str = ""
    """One phrase for help and docs: the data that is sent, and the transport."""
    on_device: bool = False
    """Whether the collective gets tensors on the rank's CUDA device; otherwise they are in host memory."""
    obstacle: Callable[[Sequence[DeviceSpec]], str | None] = _no_obstacle
    """Returns the reason why the backend cannot be used on these devices; None if it can."""
    drawback: Callable[[Sequence[DeviceSpec], Sequence[str]], str | None] = _no_drawback
    """Returns the reason why `auto` does not choose the backend for these devices and hosts; None if it may."""
    choose_when: str = ""
    """The reason given when `auto` chooses the backend."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name) or self.name == AUTO:
            raise ConfigError(
                f"the name of a backend must be lower-case letters, digits and _, and not auto, got {self.name!r}",
                hint='pass name="my_backend"',
            )
        if not callable(self.open):
            raise ConfigError(
                f"open of backend {self.name!r} must be a function, got {type(self.open).__name__}",
                hint="pass open=a_function that takes a CollectiveContext and returns a collective",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendChoice:
    """The backend of averages, and the reason for it."""

    spec: BackendSpec
    reason: str

    @property
    def backend(self) -> str:
        return self.spec.name


def _open_cpu(context: CollectiveContext) -> RankCollective:
    """Open shared memory if all ranks are on one host and can share it, else Gloo."""
    if len(set(context.hosts)) == 1:
        with contextlib.suppress(NoSharedMemory):
            collective = SharedMemoryCollective.open(
                context.rank,
                exchange=partial(context.exchange_json, name="shared memory sockets"),
                timeout_s=context.timeout_s,
                what=context.what,
                base=context.private_folder,
            )
            context.at_end(collective.close)
            return collective
    return GroupCollective(context.new_group("cpu"), what=context.what, peers=context.peers)


def _open_nccl(context: CollectiveContext) -> RankCollective:
    return GroupCollective(context.new_group("nccl"), what=context.what, peers=context.peers)


def _obstacle_to_nccl(specs: Sequence[DeviceSpec]) -> str | None:
    for rank, spec in enumerate(specs):
        if spec.kind != "cuda":
            return f"rank {rank} is on {spec}, and nccl joins CUDA devices only"
    return None if dist.is_nccl_available() else "this torch was built without nccl"


def _drawback_of_nccl(specs: Sequence[DeviceSpec], hosts: Sequence[str]) -> str | None:
    """The reason against NCCL if ranks share a GPU without slices: they then take turns, which is ten times slower."""
    first_at: dict[tuple[str, str], int] = {}
    for rank, (spec, host) in enumerate(zip(specs, hosts, strict=True)):
        other = first_at.setdefault((host, spec.torch_name), rank)
        if other != rank and spec.share is None and specs[other].share is None:
            return f"ranks {other} and {rank} share {spec} without slices, where nccl is slower"
    return None


# Ordered from the most general to the fastest: `auto` chooses the last backend without a drawback.
_TABLE = (
    BackendSpec(
        name="cpu",
        open=_open_cpu,
        summary="summed in host memory: shared memory within a host, Gloo between hosts; joins devices of any kind",
        choose_when="ranks are on devices of other kinds, or share a GPU without slices",
    ),
    BackendSpec(
        name="nccl",
        open=_open_nccl,
        summary="summed between CUDA devices by NCCL",
        on_device=True,
        obstacle=_obstacle_to_nccl,
        drawback=_drawback_of_nccl,
        choose_when="every rank has a CUDA device, or a slice of one, of its own",
    ),
)

BACKEND_TABLE = {spec.name: spec for spec in _TABLE}
BACKENDS = (AUTO, *BACKEND_TABLE)


def backend_spec(backend: str | BackendSpec) -> BackendSpec:
    """The spec of a backend of this package, or the user's own spec; raises a ConfigError for anything else."""
    if isinstance(backend, BackendSpec):
        if backend != BACKEND_TABLE.get(backend.name, backend):
            raise ConfigError(
                f"a backend of your own cannot be called {backend.name!r}: that is a backend of outrider",
                hint="records know backends by their names: choose another",
            )
        return backend
    if backend in BACKEND_TABLE:
        return BACKEND_TABLE[backend]
    close = nearest(str(backend), BACKENDS)
    guess = f"did you mean {close}? " if close else ""
    raise ConfigError(f"unknown backend {backend!r}", hint=f"{guess}backends are {', '.join(BACKENDS)}")


def choose_backend(
    backend: str | BackendSpec,
    specs: Sequence[DeviceSpec],
    *,
    hosts: Sequence[str] | None = None,
    has_one_torch: bool = True,
) -> BackendChoice:
    """Choose the backend for ranks on these devices; `hosts` is the host of each rank, by default one host for all."""
    if backend == AUTO:
        return _choose(specs, hosts or [""] * len(specs), has_one_torch=has_one_torch)
    spec = backend_spec(backend)
    obstacle = spec.obstacle(specs) or _different_torch(spec, has_one_torch)
    if obstacle:
        raise DeviceError(
            f"backend {spec.name} cannot be used: {obstacle}", hint='leave backend out, or pass backend="cpu"'
        )
    return BackendChoice(spec=spec, reason="asked for")


def _different_torch(spec: BackendSpec, has_one_torch: bool) -> str | None:
    """The reason against a device backend if torch builds differ: both ends need the same communication library."""
    return "ranks have different torch builds" if spec.on_device and not has_one_torch else None


def _choose(specs: Sequence[DeviceSpec], hosts: Sequence[str], *, has_one_torch: bool) -> BackendChoice:
    against_faster: list[str] = []
    for spec in reversed(_TABLE):
        against = spec.obstacle(specs) or _different_torch(spec, has_one_torch) or spec.drawback(specs, hosts)
        if not against:
            return BackendChoice(spec=spec, reason=f"auto: {'; '.join(against_faster) or spec.choose_when}")
        against_faster.append(against)
    raise AssertionError("the first backend of the table works everywhere")
