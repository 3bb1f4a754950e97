"""The world as a rank sees it: who takes part, on which devices, and the groups in which they meet.

Decides the backend of averages, and sets device, threads and network interface of this process.
Does not decide what is averaged or when. Called by the rank driver, once per process.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import psutil
import torch
import torch.distributed as dist

# Its functions keep the group that exists at import as a default. torch imports it behind the first optimizer,
# and the store's port would then stay open: so it is imported before there is a group.
import torch.distributed.nn
from torch._C._distributed_c10d import PrefixStore, Store

from outrider.errors import ConfigError, DeviceError, PeerLostError, WaitError, nearest
from outrider.machine.devices import DeviceSpec, parse_devices
from outrider.runtime.messages import Link
from outrider.runtime.store import open_store

BACKENDS = ("auto", "cpu", "nccl")
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SETTLE_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The backend of the averages, cpu or nccl, and why."""

    backend: str
    reason: str


def choose_backend(backend: str, specs: Sequence[DeviceSpec], *, hosts: Sequence[str] | None = None) -> Choice:
    """The backend for ranks on these devices; `hosts` says on which host each rank is, where there are several."""
    if backend not in BACKENDS:
        close = nearest(backend, BACKENDS)
        guess = f"did you mean {close}? " if close else ""
        raise ConfigError(f"unknown backend {backend!r}", hint=f"{guess}backends are {', '.join(BACKENDS)}")
    if backend == "cpu":
        return Choice(backend="cpu", reason="asked for")
    obstacle = _obstacle_to_nccl(specs, hosts or [""] * len(specs))
    if backend == "nccl":
        if obstacle:
            raise DeviceError(
                f"backend nccl cannot be used: {obstacle}", hint='leave backend out, or pass backend="cpu"'
            )
        return Choice(backend="nccl", reason="asked for")
    if obstacle:
        return Choice(backend="cpu", reason=f"auto: {obstacle}")
    return Choice(backend="nccl", reason="auto: every rank has a whole CUDA device of its own")


def _obstacle_to_nccl(specs: Sequence[DeviceSpec], hosts: Sequence[str]) -> str | None:
    first_at: dict[tuple[str, str], int] = {}
    for rank, (spec, host) in enumerate(zip(specs, hosts, strict=True)):
        if spec.kind != "cuda":
            return f"rank {rank} is on {spec}, and nccl joins CUDA devices only"
        if spec.share is not None:
            return f"rank {rank} is on {spec}, and nccl needs whole devices"
        other = first_at.setdefault((host, spec.torch_name), rank)
        if other != rank:
            return f"ranks {other} and {rank} share {spec}, and nccl needs a device per rank"
    return None if dist.is_nccl_available() else "this torch was built without nccl"


class World:
    """All ranks of a run, joined: `with World.join(link) as world:` in every rank.

    Whatever meets other ranks is called by all of them, in the same order.
    """

    def __init__(self, *, link: Link, store: Store, timeout_s: float) -> None:
        self.environment = link.environment
        self.rank = link.environment.rank
        self.size = link.environment.world_size
        self.spec = link.spec
        self.device = torch.device(link.spec.torch_name)
        self.store = store
        self.timeout_s = timeout_s
        self.specs: tuple[DeviceSpec, ...] = ()
        self.hosts: tuple[str, ...] = ()
        self._rounds: Counter[str] = Counter()
        self._has_nccl = False
        self._undo = ExitStack()

    @classmethod
    def join(cls, link: Link, *, timeout_s: float = 600.0) -> World:
        """Wait for all ranks; `timeout_s` holds for this and for every later wait unless said otherwise."""
        _use_device(link)
        world = cls(link=link, store=open_store(link.environment, timeout_s=timeout_s), timeout_s=timeout_s)
        world._undo.callback(world._drop_store)
        try:
            world._meet()
        except BaseException:
            world._undo.close()
            raise
        return world

    def _meet(self) -> None:
        self.barrier("all ranks to start")
        if self.environment.is_one_host:
            self._undo.enter_context(_gloo_on_loopback())
        dist.init_process_group(
            "gloo",
            store=PrefixStore("gloo", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout_s),
        )
        self._undo.callback(_destroy_groups)
        seats = self.exchange_json({"device": str(self.spec), "host": socket.gethostname()}, name="seats")
        self.specs = parse_devices([seat["device"] for seat in seats])
        self.hosts = tuple(seat["host"] for seat in seats)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._await_leave()
        elif self._has_nccl:
            # Destroying an NCCL group waits for peers that may never come; the end of the process does not.
            return
        self._undo.close()

    def _await_leave(self) -> None:
        """Where rank 0 serves the store, it must be the last to go."""
        if not self.environment.has_store and self.size > 1:
            self.barrier("all ranks to leave")

    def _drop_store(self) -> None:
        # A store has no close(): it ends with its last reference, and an error's traceback may keep this object.
        del self.store

    def group_for(self, backend: str) -> dist.ProcessGroup:
        """A new group of all ranks for averages with backend cpu (Gloo) or nccl."""
        self._has_nccl |= backend == "nccl"
        group: dist.ProcessGroup = dist.new_group(
            backend="nccl" if backend == "nccl" else "gloo", timeout=timedelta(seconds=self.timeout_s)
        )
        return group

    def barrier(self, what: str, timeout_s: float | None = None) -> None:
        """Wait until every rank is here; `what` is waited for, in words."""
        self._exchange("barrier", what, None, what=what, timeout_s=timeout_s)

    def exchange_json(self, value: Any, *, name: str = "values", timeout_s: float | None = None) -> list[Any]:
        """The values of all ranks, in their order, on every rank."""
        prefix = self._exchange("exchange", name, value, what=f"{name} of all ranks", timeout_s=timeout_s)
        return [json.loads(self.store.get(f"{prefix}/{rank}")) for rank in range(self.size)]

    def gather_json(self, name: str, value: Any, timeout_s: float | None = None) -> list[Any] | None:
        """The values of all ranks, in their order, on rank 0; None on the others, which do not wait."""
        prefix = self._post("gather", name, value)
        if self.rank != 0:
            return None
        self._await_all(prefix, what=f"{name} of all ranks", timeout_s=timeout_s)
        keys = [f"{prefix}/{rank}" for rank in range(self.size)]
        values = [json.loads(self.store.get(key)) for key in keys]
        for key in keys:
            self.store.delete_key(key)
        return values

    def _exchange(self, kind: str, name: str, value: Any, *, what: str, timeout_s: float | None) -> str:
        prefix = self._post(kind, name, value)
        self._await_all(prefix, what=what, timeout_s=timeout_s)
        # Who is here has left the round before, so nobody will read its keys again.
        previous = self._rounds[f"{kind}/{name}"] - 1
        if previous > 0:
            self.store.delete_key(f"{kind}/{name}/{previous}/{self.rank}")
        return prefix

    def _post(self, kind: str, name: str, value: Any) -> str:
        self._rounds[f"{kind}/{name}"] += 1
        prefix = f"{kind}/{name}/{self._rounds[f'{kind}/{name}']}"
        self.store.set(f"{prefix}/{self.rank}", json.dumps(value))
        return prefix

    def _await_all(self, prefix: str, *, what: str, timeout_s: float | None) -> None:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            self.store.wait([f"{prefix}/{rank}" for rank in range(self.size)], timedelta(seconds=limit_s))
        except dist.DistStoreError as error:
            missing = [str(rank) for rank in range(self.size) if not self.store.check([f"{prefix}/{rank}"])]
            if missing:
                raise WaitError(
                    f"rank {self.rank} waited {limit_s:g} s for {what}, "
                    f"rank{'' if len(missing) == 1 else 's'} {', '.join(missing)} did not come",
                    hint="see the logs of the missing ranks",
                    rank=self.rank,
                ) from error
        except dist.DistNetworkError as error:
            raise PeerLostError(
                f"rank {self.rank} lost the store while it waited for {what}", rank=self.rank
            ) from error


def _destroy_groups() -> None:
    # The destructor of a Gloo group joins its threads while it holds the interpreter's lock, and a thread that just
    # ended a collective wants that lock to let go of it: let them settle first.
    time.sleep(_SETTLE_S)
    dist.destroy_process_group()


def _use_device(link: Link) -> None:
    """Make the rank's device the current one of this process, and give it its threads."""
    torch.set_num_threads(link.num_threads)
    kind, index = link.spec.kind, link.spec.index
    modules: dict[str, Any] = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.mps}
    module = modules.get(kind)
    if module is None:
        return
    num_devices = module.device_count()
    if num_devices <= (index or 0):
        raise DeviceError(
            f"rank {link.rank} is to use {link.spec}, torch {torch.__version__} finds {num_devices} {kind} devices",
            hint="run `outrider diagnose`",
            rank=link.rank,
        )
    if index is not None:
        module.set_device(index)


@contextmanager
def _gloo_on_loopback() -> Iterator[None]:
    """Keep Gloo on this host; an interface that the user chose stays chosen."""
    name = loopback_interface()
    if name is None or _GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[_GLOO_INTERFACE] = name
    try:
        yield
    finally:
        os.environ.pop(_GLOO_INTERFACE, None)


def loopback_interface() -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return str(name)
    return None
