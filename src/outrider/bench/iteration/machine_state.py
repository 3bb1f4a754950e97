"""The state of the machine while something is measured: how busy other programs keep it, and how its GPUs are wired.

Decides what counts as others, and when machines are too unlike for one benchmark. Called by the iteration benchmark,
whose file keeps both, because the comparison of two files must know.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from outrider.errors import DeviceError
from outrider.machine import child_process
from outrider.world.messages import Link
from outrider.world.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorTime:
    """Seconds of all cores since the machine started, and those that were ours."""

    busy_s: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> ProcessorTime:
        times = psutil.cpu_times()
        # Linux counts guests twice, once as their host's user time.
        all_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        own = os.times()
        own_s = own.user + own.system + own.children_user + own.children_system
        return cls(busy_s=all_s - idle_s, all_s=all_s, own_s=own_s)


def others_part(before: ProcessorTime, after: ProcessorTime) -> float | None:
    """The part of all cores that others used in between; None if no time has passed."""
    all_s = after.all_s - before.all_s
    if all_s <= 0:
        return None
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others_s / all_s))


_TIMEOUT_S = 20.0
# It prints escape codes for its heading even without a terminal.
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def read_topology() -> str | None:
    """What `nvidia-smi topo -m` prints; None if there is no such program."""
    ended = child_process.run(["nvidia-smi", "topo", "-m"], timeout_s=_TIMEOUT_S)
    return _STYLE.sub("", ended.stdout).strip() if ended.code == 0 else None


def check_machines(link: Link, *, timeout_s: float) -> None:
    """Exchange the topology of all machines; raises an error on all ranks if two differ."""
    with World.join(link, timeout_s=timeout_s) as world:
        check_same(world.exchange_json(read_topology(), name="topologies"), world.hosts)


def check_same(topologies: Sequence[str | None], hosts: Sequence[str]) -> None:
    for topology, host in zip(topologies, hosts, strict=True):
        if topology != topologies[0]:
            raise DeviceError(
                f"the GPUs of {host} are wired differently from those of {hosts[0]}",
                hint="compare `nvidia-smi topo -m` on both; measure machines of one kind at a time",
            )
