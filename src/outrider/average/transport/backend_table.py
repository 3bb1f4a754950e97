"""The table of backends: how averages travel between ranks, how each is opened, and when and why it is chosen.

Decides the backend for given devices. Everything else that depends on it reads its row. A user hands a `BackendSpec`
to `backend=`. Called by `train()`, `Session` and the benchmarks; the world opens what was chosen.
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
    """Tells all ranks a value and returns those of all, in their order; every rank calls it."""

    def __call__(self, value: Any, *, name: str) -> list[Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveContext:
    """What a backend gets to open a collective; every rank opens it at the same time."""

    rank: int
    world_size: int
    hosts: tuple[str, ...]
    """The host of each rank."""
    what: str
    """What will travel, for errors."""
    timeout_s: float
    exchange_json: ExchangeJson
    """Goes through the store: for addresses, not for tensors."""
    new_group: Callable[[str], dist.ProcessGroup]
    """A process group of all ranks: `cpu` is Gloo, `nccl` is NCCL."""
    peers: tuple[Peer, ...]
    """Where the ranks are, if they are on several hosts."""
    private_folder: str | None
    """Removed at the end of the run even where this rank is killed; None if there is none."""
    at_end: Callable[[Callable[[], object]], object]
    """Calls a function when the rank leaves the world."""


def _no_obstacle(specs: Sequence[DeviceSpec]) -> str | None:
    return None


def _no_drawback(specs: Sequence[DeviceSpec], hosts: Sequence[str]) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    """A way for averages to travel."""

    name: str
    """In records."""
    open: Callable[[CollectiveContext], RankCollective]
    summary: str = ""
    """What travels how, in one phrase: for help and docs."""
    on_device: bool = False
    """Tensors are handed over on the CUDA device of the rank; else in host memory."""
    obstacle: Callable[[Sequence[DeviceSpec]], str | None] = _no_obstacle
    """Why it cannot be used on these devices; None if it can."""
    drawback: Callable[[Sequence[DeviceSpec], Sequence[str]], str | None] = _no_drawback
    """Why `auto` does not choose it for these devices on these hosts; None if it may."""
    choose_when: str = ""
    """Why `auto` chooses it."""

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
    """The backend of averages, and the reason."""

    spec: BackendSpec
    reason: str

    @property
    def backend(self) -> str:
        return self.spec.name


def _open_cpu(context: CollectiveContext) -> RankCollective:
    """Memory that all ranks see where all are on one host and can share it, else Gloo."""
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
    """The reason against NCCL if ranks share a GPU without slices: they take turns then, which is ten times slower."""
    first_at: dict[tuple[str, str], int] = {}
    for rank, (spec, host) in enumerate(zip(specs, hosts, strict=True)):
        other = first_at.setdefault((host, spec.torch_name), rank)
        if other != rank and spec.share is None and specs[other].share is None:
            return f"ranks {other} and {rank} share {spec} without slices, where nccl is slower"
    return None


# From the most general to the fastest: `auto` chooses the last backend without a drawback.
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
    """The row of a backend of this package, or the user's own; raises a ConfigError for anything else."""
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
    """Choose the backend for ranks on these devices; `hosts` has the host of each rank, if there are several."""
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
    """Builds of torch bring libraries of their own, which must be the same on both ends of a device's link."""
    return "ranks have different torch builds" if spec.on_device and not has_one_torch else None


def _choose(specs: Sequence[DeviceSpec], hosts: Sequence[str], *, has_one_torch: bool) -> BackendChoice:
    against_faster: list[str] = []
    for spec in reversed(_TABLE):
        against = spec.obstacle(specs) or _different_torch(spec, has_one_torch) or spec.drawback(specs, hosts)
        if not against:
            return BackendChoice(spec=spec, reason=f"auto: {'; '.join(against_faster) or spec.choose_when}")
        against_faster.append(against)
    raise AssertionError("the first backend of the table works everywhere")
