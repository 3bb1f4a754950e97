"""torch's default process group: opened for a world, or adopted if the program already has one.

Reads rank, world size and store from an existing group. Ray, Lightning, accelerate and users' own scripts create such
groups; they still own them, so an adopted group is not destroyed here. Called by `api` and by World.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from outrider.errors import ConfigError
from outrider.world.environment import Environment, adopted

_LOOPBACK = "127.0.0.1"
_SETTLE_S = 0.05
"""The destructor of a Gloo group joins its threads while it holds the GIL, and a thread that has just finished a
collective needs the GIL to release it. So groups are destroyed once their threads are idle."""
_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


def existing_ranks(variables: Mapping[str, str] = os.environ) -> Environment | None:
    """The environment of this process if it already is a rank of a process group or a launcher; None otherwise."""
    has_peers = dist.is_initialized() and dist.get_world_size() > 1
    return environment_of_group(variables) if has_peers else adopted(variables)


def environment_of_group(variables: Mapping[str, str] = os.environ) -> Environment:
    """Rank, world size and hosts from the default group; all ranks call this, unless variables set the local ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if all(variables.get(name) for name in _LOCAL):
        local_rank, local_world_size = (int(variables[name]) for name in _LOCAL)
        hosts = [socket.gethostname()]
    else:
        hosts = _hosts(rank, world_size)
        local_rank, local_world_size = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    is_one_host = local_world_size == world_size
    return Environment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=variables.get("MASTER_ADDR") or (_LOOPBACK if is_one_host else hosts[0]),
        master_port=int(variables.get("MASTER_PORT") or 0),
        has_store=True,
        has_group=True,
    )


def _hosts(rank: int, world_size: int) -> list[str]:
    """The host of each rank, exchanged through the store of the group."""
    store = PrefixStore("outrider/hosts", _get_default_store())
    store.set(str(rank), socket.gethostname())
    return [store.get(str(other)).decode() for other in range(world_size)]


class DefaultGroup:
    """The default group during a world, and the groups that are created in addition to it."""

    def __init__(self, *, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank, self._world_size = rank, world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._is_adopted = dist.is_initialized()
        self._groups: list[dist.ProcessGroup] = []
        if self._is_adopted:
            self._check()

    @property
    def is_adopted(self) -> bool:
        return self._is_adopted

    def _check(self) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if (rank, world_size) != (self._rank, self._world_size):
            raise ConfigError(
                f"a process group exists in which this is rank {rank} of {world_size}, but this process was started as "
                f"rank {self._rank} of {self._world_size}",
                hint="call init_process_group with the RANK and WORLD_SIZE of the environment, or leave it out: the "
                "session makes one",
                rank=self._rank,
            )

    def open(self, store: Store) -> None:
        """Create the default group in this store; call this only if none exists."""
        dist.init_process_group(
            "gloo",
            store=PrefixStore("gloo", store),
            rank=self._rank,
            world_size=self._world_size,
            timeout=self._timeout,
        )

    def new(self, backend: str) -> dist.ProcessGroup:
        """Create a group of all ranks; all ranks call this."""
        group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=self._timeout)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Destroy the groups of this world, except an adopted default group, which the program owns."""
        groups, self._groups = self._groups, []
        if not self._is_adopted:
            end_default_group()
            return
        time.sleep(_SETTLE_S)
        for group in groups:
            # Groups that were aborted after an error no longer exist.
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)


def end_default_group() -> None:
    """Destroy the default group and all other groups, if there is a default group."""
    if dist.is_initialized():
        time.sleep(_SETTLE_S)
        dist.destroy_process_group()
