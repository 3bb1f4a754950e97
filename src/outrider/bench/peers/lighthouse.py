"""torchft's Lighthouse and one Manager per rank, on loopback: started and ended here, inside the ranks' processes.

Decides addresses and limits of time; a quorum is all ranks, for a benchmark without some of them would be another one.
Called by the torchft peers in ranks; torchft is imported nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from outrider.replica.replica import Replica
from outrider.runtime.store import serve_store
from outrider.runtime.world import World

_HOST = "127.0.0.1"


@contextmanager
def open_manager(replica: Replica, world: World, *, backend: str) -> Iterator[Any]:
    """This rank's Manager, as a replica group of one."""
    from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

    limit = timedelta(seconds=world.timeout_s)
    group = (ProcessGroupNCCL if backend == "nccl" else ProcessGroupGloo)(timeout=limit)
    # Each replica group has a store of its own; that of one of them is where a quorum's process groups meet.
    store = serve_store(_HOST, 0)
    with _lighthouse(world) as address:
        manager = Manager(
            pg=group,
            load_state_dict=partial(_load_state, replica),
            state_dict=partial(_state, replica),
            min_replica_size=world.size,
            # DiLoCo needs it so, and LocalSGD asks for a quorum only when it averages: nothing could overlap.
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=limit,
            rank=0,
            world_size=1,
            store_addr=_HOST,
            store_port=store.port,
            lighthouse_addr=address,
            replica_id=f"outrider_{world.rank}",
            hostname=_HOST,
            # As documented for replicas that begin alike: nothing has to be sent to the others first.
            init_sync=False,
            # An average that fails ends the run, instead of leaving each rank to itself.
            max_retries=0,
        )
        try:
            yield manager
        finally:
            manager.shutdown(wait=True)
            group.shutdown()


def _state(replica: Replica) -> dict[str, Any]:
    return {"model": replica.model.state_dict(), "optim": replica.optimizer.state_dict()}


def _load_state(replica: Replica, state: dict[str, Any]) -> None:
    replica.model.load_state_dict(state["model"])
    replica.optimizer.load_state_dict(state["optim"])


@contextmanager
def _lighthouse(world: World) -> Iterator[str]:
    """Rank 0 hosts it; all ranks get its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind=f"{_HOST}:0", min_replicas=world.size) if world.rank == 0 else None
    try:
        # It gives the name of the host, which need not resolve; it listens on loopback only.
        port = server.address().rpartition(":")[2] if server else None
        ports = world.exchange_json(port, name="lighthouse ports")
        yield f"http://{_HOST}:{ports[0]}"
        world.barrier("all torchft managers to end")
    finally:
        if server:
            server.shutdown()
