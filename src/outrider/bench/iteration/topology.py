"""How the GPUs of a machine are wired, as the driver tells, and the refusal to mix machines that are wired differently.

Decides when machines are unlike; a benchmark over both would measure neither. Called by the iteration benchmark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from outrider.errors import DeviceError
from outrider.machine import child
from outrider.runtime.messages import Link
from outrider.runtime.world import World

_TIMEOUT_S = 20.0
# It underlines its heading even where nobody can see it.
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def read_topology() -> str | None:
    """What `nvidia-smi topo -m` prints; None where there is no such program."""
    ended = child.run(["nvidia-smi", "topo", "-m"], timeout_s=_TIMEOUT_S)
    return _STYLE.sub("", ended.stdout).strip() if ended.code == 0 else None


def check_machines(link: Link, *, timeout_s: float) -> None:
    """Every rank tells what its machine looks like; all refuse where two differ."""
    with World.join(link, timeout_s=timeout_s) as world:
        check_same(world.exchange_json(read_topology(), name="topologies"), world.hosts)


def check_same(topologies: Sequence[str | None], hosts: Sequence[str]) -> None:
    for topology, host in zip(topologies, hosts, strict=True):
        if topology != topologies[0]:
            raise DeviceError(
                f"the GPUs of {host} are wired differently from those of {hosts[0]}",
                hint="compare `nvidia-smi topo -m` on both; measure machines of one kind at a time",
            )
