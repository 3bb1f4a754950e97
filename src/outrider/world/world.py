"""The world as a rank sees it: all ranks, their devices, and the process groups.

Sets device, threads and network interface of this process, and opens the transports of averages.
Does not decide what is averaged or when. Opened by `api` and `rank`, once per run.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# This torch module keeps the group that exists at its import as a default argument. torch imports it with the first
# optimizer, which would keep the store's port open. So we import it before any group exists.
import torch.distributed.nn
from torch._C._distributed_c10d import HashStore, Store

from outrider import faults
from outrider.average.transport.backend_table import BackendSpec, CollectiveContext, backend_spec
from outrider.average.transport.collective import Peer, RankCollective
from outrider.errors import DeviceError, PeerLostError
from outrider.machine.devices import DeviceSpec, parse_devices
from outrider.slices import slice_check, slice_matmul_check
from outrider.world import crossed_waits, nccl_environment
from outrider.world.crossed_waits import Meeting
from outrider.world.default_group import DefaultGroup
from outrider.world.environment import Environment
from outrider.world.memory_limit import limit_memory
from outrider.world.messages import Link
from outrider.world.network_interface import (
    HostAddress,
    NetworkInterface,
    choose_interface,
    gloo_on,
    place_here,
    trouble_with,
    unconnected,
)
from outrider.world.rank_builds import RankBuild, build_here, refuse_different_outriders
from outrider.world.rendezvous import await_keys, meet
from outrider.world.shared_secret import check_same_secret, shared_secret
from outrider.world.short_traceback import tell_briefly
from outrider.world.store import WatchedStore, close_store, group_store, is_ours, open_store, own_store

Fact = TypeVar("Fact", nccl_environment.NcclRank, HostAddress, NetworkInterface, RankBuild)

_worlds = itertools.count()
"""Counts the worlds that this process has joined; all ranks join the same worlds in the same order."""


class World:
    """All ranks of a run: `with World.join(link) as world:` in every rank.

    All ranks must call the methods that communicate, in the same order.
    """

    def __init__(self, *, link: Link, store: WatchedStore, timeout_s: float) -> None:
        self._link = link
        self.environment = link.environment
        self.rank = link.environment.rank
        self.size = link.environment.world_size
        self.spec = link.spec
        self.device = torch.device(link.spec.torch_name)
        self.store = store
        self._is_served_by_rank_0 = not link.environment.has_store
        self.group_store: Store = store.raw
        """The store in which torch's process groups exchange addresses."""
        self.timeout_s = timeout_s
        self.specs: tuple[DeviceSpec, ...] = ()
        self.hosts: tuple[str, ...] = ()
        self.builds: tuple[RankBuild, ...] = (build_here(),)
        """The versions of Outrider, torch and Python of each rank."""
        self._seats: tuple[nccl_environment.NcclRank, ...] = ()
        self._peers: tuple[Peer, ...] = ()
        """The host of each rank, if there are several hosts."""
        self._rounds: Counter[str] = Counter()
        self._num_led = 0
        """How often rank 0 has told, and this rank has read, where rank 0's loop goes on."""
        self._nccl_groups: list[dist.ProcessGroup] = []
        self._default_group = DefaultGroup(rank=self.rank, world_size=self.size, timeout_s=timeout_s)
        self._undo = ExitStack()

    @classmethod
    def join(cls, link: Link, *, timeout_s: float = 600.0) -> World:
        """Join the world and wait for all ranks; `timeout_s` also applies to later waits by default."""
        _use_device(link)
        lift_limit = limit_memory(link.spec, rank=link.rank)
        faults.arm(link.rank)
        # Keep the store in no local variable: the traceback of an error would keep the store's port open.
        world = cls(link=link, store=_open_store(link.environment, timeout_s=timeout_s), timeout_s=timeout_s)
        world._undo.callback(world._drop_store)
        world._undo.callback(faults.disarm)
        world._undo.callback(lift_limit)
        try:
            world._meet()
        except BaseException as error:
            world._give_up(error)
            world._undo.close()
            raise
        return world

    @classmethod
    def alone(cls, link: Link, *, timeout_s: float = 600.0) -> World:
        """Open a world of this process only, without a port and without a process group."""
        _use_device(link)
        lift_limit = limit_memory(link.spec, rank=link.rank)
        faults.arm(link.rank)
        world = cls(link=link, store=WatchedStore(HashStore(), link.environment), timeout_s=timeout_s)
        world._undo.callback(world._drop_store)
        world._undo.callback(faults.disarm)
        world._undo.callback(lift_limit)
        world.specs, world.hosts = (link.spec,), (socket.gethostname(),)
        return world

    @property
    def is_one_host(self) -> bool:
        return len(set(self.hosts)) == 1

    @property
    def is_on_cpus(self) -> bool:
        """Whether every rank computes on a CPU."""
        return all(spec.kind == "cpu" for spec in self.specs)

    def _meet(self) -> None:
        attempt = meet(self.store, rank=self.rank, world_size=self.size, timeout_s=self.timeout_s)
        self.store = self.store.under(attempt)
        if not is_ours(self.store.raw):
            check_same_secret(partial(self.exchange_json, name="proofs"), rank=self.rank, secret=shared_secret())
            self._leave_torchruns_store()
        self._connect()
        gpu_index = self.spec.index if self.spec.kind == "cuda" else None
        seat = nccl_environment.take_seat(device=str(self.spec), host=socket.gethostname(), gpu_index=gpu_index)
        self._seats = self._exchange_facts(seat, name="seats")
        self.builds = self._exchange_facts(build_here(), name="builds")
        refuse_different_outriders(self.builds)
        self.specs = parse_devices([seat.device for seat in self._seats])
        self.hosts = tuple(seat.host for seat in self._seats)

    def _leave_torchruns_store(self) -> None:
        """Replace torchrun's store by a private store if all ranks are on one host."""
        exchange = partial(self.exchange_json, name="private stores")
        own = own_store(self.environment, exchange=exchange, timeout_s=self.timeout_s)
        if own is not None:
            self.store = WatchedStore(own, self.environment)
            self._is_served_by_rank_0 = True

    def _connect(self) -> None:
        places = self._exchange_facts(place_here(self.environment.master_addr), name="places")
        interfaces = self._exchange_facts(choose_interface(self.rank, places), name="network interfaces")
        trouble = trouble_with(interfaces)
        if trouble is not None:
            self.await_leave()
            raise trouble
        if len({place.stack for place in places}) > 1:
            pairs = zip(places, interfaces, strict=True)
            self._peers = tuple(Peer(host=place.host, address=interface.address) for place, interface in pairs)
        self._undo.enter_context(gloo_on(interfaces[self.rank]))
        if not self._default_group.is_adopted:
            try:
                self._open_group()
            except RuntimeError as error:
                raise unconnected(self.rank, places, interfaces, error) from error
        self._undo.callback(self._default_group.close)

    def _open_group(self) -> None:
        self.group_store = group_store(
            self.store.raw,
            environment=self.environment,
            timeout_s=self.timeout_s,
            exchange=partial(self.exchange_json, name="shared folders"),
            at_end=self._undo.callback,
        )
        self._default_group.open(self.group_store)

    @property
    def has_one_torch(self) -> bool:
        """Whether all ranks run the same torch build."""
        return len({build.torch for build in self.builds}) == 1

    def _exchange_facts(self, own: Fact, *, name: str) -> tuple[Fact, ...]:
        """Exchange a dataclass; returns the values of all ranks in rank order."""
        return tuple(type(own)(**fields) for fields in self.exchange_json(asdict(own), name=name))

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.await_leave()
        elif not self._give_up(error):
            # A group that cannot be aborted stays until the process ends.
            return
        self._undo.close()

    def _give_up(self, error: BaseException) -> bool:
        if not self._link.owns_process:
            tell_briefly(error)
        return self.abort_nccl()

    def await_leave(self) -> None:
        """If rank 0 serves the store, it waits here for the other ranks, because it must leave last."""
        if self.size == 1 or not self._is_served_by_rank_0:
            return
        meeting = self._post("barrier", "leave", None, what="all ranks to leave")
        if self.rank == 0:
            self._await_all(meeting, timeout_s=None)

    def _drop_store(self) -> None:
        close_store(self.store.raw)
        # torch's stores have no close(): they close with the last reference, and a traceback may keep this object.
        del self.store, self.group_store

    def group_for(self, backend: str) -> dist.ProcessGroup:
        """Create a group of all ranks for averages with backend cpu (Gloo) or nccl."""
        if backend == "nccl":
            return self._join_nccl()
        return self._default_group.new("gloo")

    def collective_for(self, backend: str | BackendSpec, *, what: str = "parameters") -> RankCollective:
        """Open the transport of averages with this backend; `what` names the averaged data in errors."""
        store = self.environment.store
        return backend_spec(backend).open(
            CollectiveContext(
                rank=self.rank,
                world_size=self.size,
                hosts=self.hosts,
                what=what,
                timeout_s=self.timeout_s,
                exchange_json=self.exchange_json,
                new_group=self.group_for,
                peers=self._peers,
                # The process of the store removes its folder even if this rank is killed.
                private_folder=None if store is None else os.path.dirname(store),
                at_end=self._undo.callback,
            )
        )

    def _join_nccl(self) -> dist.ProcessGroup:
        if not self._nccl_groups:
            nccl_environment.check_versions(self._seats)
            self._undo.enter_context(nccl_environment.told(nccl_environment.variables(self.rank, self._seats)))
        group = self._default_group.new("nccl")
        self._nccl_groups.append(group)
        try:
            # NCCL creates a communicator at its first use; using it here gives a clear error.
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

    def abort_nccl(self) -> bool:
        """Abort all NCCL groups and their pending work, even if peers have died; false if one does not end.

        Afterwards all ranks can call `group_for` to create new groups.
        """
        groups, self._nccl_groups = self._nccl_groups, []
        have_ended = [nccl_environment.abort(group) for group in groups]
        return all(have_ended)

    def barrier(self, what: str, timeout_s: float | None = None) -> None:
        """Wait until every rank has arrived; `what` describes the wait in error messages."""
        # Remove numbers such as the epoch, because otherwise the keys of every epoch would stay in the store.
        name = re.sub(r"\d+", "", what)
        self._exchange("barrier", name, None, what=what, timeout_s=timeout_s)

    def exchange_json(
        self, value: Any, *, name: str = "values", what: str | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """All-gather of JSON values, in rank order; `what` describes the wait in error messages."""
        what = what or f"{name} of all ranks"
        meeting = self._exchange("exchange", name, value, what=what, timeout_s=timeout_s)
        return [json.loads(self.store.get(meeting.key(rank))) for rank in range(self.size)]

    def announce_exchange(self, name: str, *, what: str) -> None:
        """Tell the other ranks that this rank's next meeting is the exchange of this name, which all must reach."""
        if self.size > 1:
            place = f"exchange/{name}"
            crossed_waits.announce(
                self.store, Meeting(place=place, number=self._rounds[place] + 1, what=what), rank=self.rank
            )

    def gather_json(self, name: str, value: Any, timeout_s: float | None = None) -> list[Any] | None:
        """Gather JSON values on rank 0, in rank order; None on the other ranks, which do not wait."""
        meeting = self._post("gather", name, value, what=f"{name} of all ranks")
        if self.rank != 0:
            return None
        self._await_all(meeting, timeout_s=timeout_s)
        keys = [meeting.key(rank) for rank in range(self.size)]
        values = [json.loads(self.store.get(key)) for key in keys]
        for key in keys:
            self.store.delete_key(key)
        return values

    def lead(self, what: str) -> None:
        """On rank 0, tell the other ranks that its loop comes to `what`, without waiting for them."""
        self._num_led += 1
        crossed_waits.lead(self.store, what, number=self._num_led)

    def follow(self, what: str) -> bool:
        """On other ranks, whether rank 0's loop comes to `what`, which this rank's loop has reached.

        For ranks that rested while rank 0 trained, so only its loop knows where it ends.
        """
        comes = crossed_waits.follow(
            self.store,
            what,
            rank=self.rank,
            number=self._num_led + 1,
            # Without announcements, as in torch's own stores, this rank follows only what rank 0 tells.
            reached=self._rounds if is_ours(self.store.raw) else None,
            limit_s=self.timeout_s,
        )
        self._num_led += comes
        return comes

    def arrive(self, name: str, *, what: str) -> Meeting:
        """Tell the other ranks that this rank has arrived, without waiting for them; see `have_arrived`.

        Between two arrivals of the same name, all ranks must synchronize in another way.
        """
        meeting = self._post("arrival", name, None, what=what)
        if meeting.number > 1:
            self.store.delete_key(replace(meeting, number=meeting.number - 1).key(self.rank))
        return meeting

    def have_arrived(self, meeting: Meeting) -> bool:
        """Whether all ranks have arrived."""
        return self.store.check([meeting.key(rank) for rank in range(self.size)])

    def refuse_absent(self, meeting: Meeting) -> None:
        """Raise a WaitError that names the ranks that did not arrive in time."""
        keys = [meeting.key(rank) for rank in range(self.size)]
        await_keys(self.store, keys, rank=self.rank, what=meeting.what, limit_s=0.0, told_s=self.timeout_s)

    def _exchange(self, kind: str, name: str, value: Any, *, what: str, timeout_s: float | None) -> Meeting:
        meeting = self._post(kind, name, value, what=what)
        self._await_all(meeting, timeout_s=timeout_s)
        # All ranks have left the previous round, so its keys can be deleted.
        if meeting.number > 1:
            self.store.delete_key(replace(meeting, number=meeting.number - 1).key(self.rank))
        return meeting

    def _post(self, kind: str, name: str, value: Any, *, what: str) -> Meeting:
        faults.reach("store")
        place = f"{kind}/{name}"
        self._rounds[place] += 1
        meeting = Meeting(place=place, number=self._rounds[place], what=what)
        self.store.set(meeting.key(self.rank), json.dumps(value))
        return meeting

    def _await_all(self, meeting: Meeting, *, timeout_s: float | None) -> None:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        if is_ours(self.store.raw):
            crossed_waits.await_all(
                self.store, meeting, rank=self.rank, world_size=self.size, reached=self._rounds, limit_s=limit_s
            )
        else:
            # torch's own stores log every wait that times out, so these get one wait.
            keys = [meeting.key(rank) for rank in range(self.size)]
            await_keys(self.store, keys, rank=self.rank, what=meeting.what, limit_s=limit_s)


def agree_on_interruption(link: Link, world: World) -> signal.Signals | None:
    """Agree on the signal that any rank received; all ranks call this and get the same result."""
    told = max(world.exchange_json(int(link.interrupted_by or 0), name="interruptions"))
    if told:
        link.interrupt(signal.Signals(told))
    return link.interrupted_by


def _open_store(environment: Environment, *, timeout_s: float) -> WatchedStore:
    """Open the store with a key prefix for this world, because a program may open several worlds on the same store."""
    return WatchedStore(open_store(environment, timeout_s=timeout_s), environment).under(f"world{next(_worlds)}")


def _use_device(link: Link) -> None:
    """Make the rank's device the current device of this process, and set its number of threads."""
    torch.set_num_threads(link.num_threads)
    if link.owns_process:
        # The momentum of weights without gradient decays below 1e-38, and x86 is many times slower with such numbers.
        # Set this in all ranks or in none, because sums would otherwise differ in their last bits. Set it before torch
        # starts threads, which inherit the setting; a user's own process may have started some already.
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
        # The first allocation initialises CUDA, and fails if another program holds the GPU exclusively.
        torch.empty(1, device=link.spec.torch_name)
    except RuntimeError as error:
        raise slice_check.unusable(link.spec, error, rank=link.rank) from error
    slice_check.check_served(link.spec, rank=link.rank)
    slice_matmul_check.mend_products(link.spec, rank=link.rank)
