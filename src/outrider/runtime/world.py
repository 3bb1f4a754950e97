"""The world as a rank sees it: who takes part, on which devices, and the groups in which they meet.

Decides the backend of averages, and sets device, threads and network interface of this process.
Does not decide what is averaged or when. Called by the rank driver, once per process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import psutil
import torch
import torch.distributed as dist

# Its functions keep the group that exists at import as a default. torch imports it behind the first optimizer,
# and the store's port would then stay open: so it is imported before there is a group.
import torch.distributed.nn
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from outrider.average.collective import GroupCollective, RankCollective
from outrider.average.doorway import NoDoorway
from outrider.average.neighbours import NeighbourCollective
from outrider.errors import ConfigError, DeviceError, PeerLostError, WaitError, nearest
from outrider.machine.devices import DeviceSpec, parse_devices
from outrider.runtime import nccl, slice_check, slice_products
from outrider.runtime.messages import Link
from outrider.runtime.store import open_store

BACKENDS = ("auto", "cpu", "nccl")
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SETTLE_S = 0.05
_worlds = itertools.count()
"""Counts the worlds that this process joined; all ranks join the same ones in the same order."""


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
    obstacle = _obstacle_to_nccl(specs)
    if backend == "nccl":
        if obstacle:
            raise DeviceError(
                f"backend nccl cannot be used: {obstacle}", hint='leave backend out, or pass backend="cpu"'
            )
        return Choice(backend="nccl", reason="asked for")
    drawback = obstacle or _drawback_of_nccl(specs, hosts or [""] * len(specs))
    if drawback:
        return Choice(backend="cpu", reason=f"auto: {drawback}")
    return Choice(backend="nccl", reason="auto: every rank has a CUDA device, or a slice of one, of its own")


def _obstacle_to_nccl(specs: Sequence[DeviceSpec]) -> str | None:
    for rank, spec in enumerate(specs):
        if spec.kind != "cuda":
            return f"rank {rank} is on {spec}, and nccl joins CUDA devices only"
    return None if dist.is_nccl_available() else "this torch was built without nccl"


def _drawback_of_nccl(specs: Sequence[DeviceSpec], hosts: Sequence[str]) -> str | None:
    """Without slices the ranks of one GPU take turns, and a sum waits for the turn of each: ten times slower."""
    first_at: dict[tuple[str, str], int] = {}
    for rank, (spec, host) in enumerate(zip(specs, hosts, strict=True)):
        other = first_at.setdefault((host, spec.torch_name), rank)
        if other != rank and spec.share is None and specs[other].share is None:
            return f"ranks {other} and {rank} share {spec} without slices, where nccl is slower"
    return None


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
        self._seats: tuple[nccl.Seat, ...] = ()
        self._rounds: Counter[str] = Counter()
        self._nccl_groups: list[dist.ProcessGroup] = []
        self._undo = ExitStack()

    @classmethod
    def join(cls, link: Link, *, timeout_s: float = 600.0) -> World:
        """Wait for all ranks; `timeout_s` holds for this and for every later wait unless said otherwise."""
        _use_device(link)
        # Kept in no variable here: the traceback of an error would keep the store's port open.
        world = cls(link=link, store=_own_keys(open_store(link.environment, timeout_s=timeout_s)), timeout_s=timeout_s)
        world._undo.callback(world._drop_store)
        try:
            world._meet()
        except BaseException:
            world._undo.close()
            raise
        return world

    @classmethod
    def alone(cls, link: Link, *, timeout_s: float = 600.0) -> World:
        """A world of this process only: no port, no group."""
        _use_device(link)
        world = cls(link=link, store=HashStore(), timeout_s=timeout_s)
        world._undo.callback(world._drop_store)
        world.specs, world.hosts = (link.spec,), (socket.gethostname(),)
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
        gpu_index = self.spec.index if self.spec.kind == "cuda" else None
        seat = nccl.take_seat(device=str(self.spec), host=socket.gethostname(), gpu_index=gpu_index)
        self._seats = tuple(nccl.Seat(**fields) for fields in self.exchange_json(asdict(seat), name="seats"))
        self.specs = parse_devices([seat.device for seat in self._seats])
        self.hosts = tuple(seat.host for seat in self._seats)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._await_leave()
        elif not self.abort_nccl():
            # Only the end of the process ends what does not even stop when told to.
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
        if backend == "nccl":
            return self._join_nccl()
        return self._new_group("gloo")

    def collective_for(self, backend: str, *, what: str = "parameters") -> RankCollective:
        """What averages with this backend meet in: memory that all see where all are on one machine, else a group."""
        if backend == "cpu" and len(set(self.hosts)) == 1:
            with contextlib.suppress(NoDoorway):
                exchange = partial(self.exchange_json, name="doorways")
                neighbours = NeighbourCollective.open(self.rank, exchange=exchange, timeout_s=self.timeout_s, what=what)
                self._undo.callback(neighbours.close)
                return neighbours
        return GroupCollective(self.group_for(backend), what=what)

    def _join_nccl(self) -> dist.ProcessGroup:
        if not self._nccl_groups:
            nccl.check_versions(self._seats)
            self._undo.enter_context(nccl.told(nccl.variables(self.rank, self._seats)))
        group = self._new_group("nccl")
        self._nccl_groups.append(group)
        try:
            # Communicators are made at their first use: now, where a failure can be explained.
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            torch.cuda.current_stream(self.device).synchronize()
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self.rank} ({self.spec}) could not join the others over nccl {self._seats[self.rank].nccl}: "
                f"{str(error).splitlines()[-1]}",
                hint='set NCCL_DEBUG=INFO and see the rank logs, or pass backend="cpu"',
                rank=self.rank,
            ) from error
        return group

    def _new_group(self, backend: str) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=timedelta(seconds=self.timeout_s))
        return group

    def abort_nccl(self) -> bool:
        """End all NCCL groups and what they have under way, though peers may be gone; false where one does not end.

        Afterwards `group_for` joins the ranks anew, where all of them call it.
        """
        groups, self._nccl_groups = self._nccl_groups, []
        have_ended = [nccl.abort(group) for group in groups]
        return all(have_ended)

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


def _own_keys(store: Store) -> Store:
    """A program may open one world after the other on the same store: each has keys of its own."""
    return PrefixStore(f"world{next(_worlds)}", store)


def _destroy_groups() -> None:
    # The destructor of a Gloo group joins its threads while it holds the interpreter's lock, and a thread that just
    # ended a collective wants that lock to let go of it: let them settle first.
    time.sleep(_SETTLE_S)
    dist.destroy_process_group()


def _use_device(link: Link) -> None:
    """Make the rank's device the current one of this process, and give it its threads."""
    torch.set_num_threads(link.num_threads)
    if link.owns_process:
        # Momenta of weights that get no gradient any more fade below 1e-38, and x86 works on such numbers many times
        # slower. In all ranks or none, or sums would differ in their last bits; and before torch has threads, which
        # take the setting from who starts them: a user's own process may have some already.
        torch.set_flush_denormal(True)
    slice_check.check_share(link.spec, rank=link.rank)
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
    if kind == "cuda":
        _use_cuda(link)
    elif index is not None:
        module.set_device(index)


def _use_cuda(link: Link) -> None:
    try:
        torch.cuda.set_device(link.spec.index)
        # CUDA starts with the first memory asked of it, and fails there where somebody else holds the GPU.
        torch.empty(1, device=link.spec.torch_name)
    except RuntimeError as error:
        raise slice_check.unusable(link.spec, error, rank=link.rank) from error
    slice_check.check_served(link.spec, rank=link.rank)
    slice_products.mend_products(link.spec, rank=link.rank)


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
