"""torchft's LocalSGD and DiLoCo, used as in its documentation and examples.

A quorum at every average, of parameters (LocalSGD) or of the displacement since the last one with an outer optimizer
(DiLoCo). A quorum is all ranks, because a benchmark without some of them would measure something else. Lighthouse and
Managers run on loopback inside the ranks' processes. Listed in `peer_table`; torchft is imported in ranks only.
"""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from outrider.bench.peers.method import Method
from outrider.bench.peers.peer import INSTALL, PeerFramework
from outrider.rank.rank_life import RunSetting
from outrider.replica.replica import Replica
from outrider.world.world import World

_HOST = "127.0.0.1"


@contextmanager
def open_manager(replica: Replica, world: World, *, backend: str) -> Iterator[Any]:
    """This rank's Manager, as a replica group of one."""
    from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

    limit = timedelta(seconds=world.timeout_s)
    group = (ProcessGroupNCCL if backend == "nccl" else ProcessGroupGloo)(timeout=limit)
    # Each replica group has a store of its own; that of one of them is where a quorum's process groups meet.
    store = _serve_store()
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


def _serve_store() -> TCPStore:
    """On loopback, where every user of this host can reach it: torchft knows only torch's TCPStore."""
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


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


HAS_WHEEL = (sys.platform, platform.machine()) == ("linux", "x86_64")
FROM_SOURCE = "pip install torchft, which needs Rust here: it has wheels for Linux on x86_64 only"
# Of torchft's examples for LocalSGD (local_sgd_integ_test.py) and for DiLoCo (train_diloco.py).
PERIOD = 2
DILOCO_PERIOD = 20
DILOCO_OUTER_RATE = 0.7
DILOCO_OUTER_MOMENTUM = 0.9
# A shorter memory, for runs of a few epochs.
TUNED_PERIOD = 20
TUNED_OUTER_RATE = 1.0
TUNED_OUTER_MOMENTUM = 0.5


@contextmanager
def torchft_local_sgd(replica: Replica, world: World, setting: RunSetting, *, period: int) -> Iterator[Method]:
    from torchft.local_sgd import LocalSGD

    group = world.group_for(setting.backend)
    with (
        open_manager(replica, world, backend=setting.backend) as manager,
        LocalSGD(manager, replica.model, replica.optimizer, sync_every=period) as local_sgd,
    ):
        yield Method(
            model=replica.model,
            group=group,
            averages=manager.current_step,
            epoch=partial(_synced_at_the_end, local_sgd),
        )


@contextmanager
def _synced_at_the_end(local_sgd: Any) -> Iterator[None]:
    """Average once more before an evaluation, because torchft's documentation leaves this open."""
    yield
    local_sgd.sync()


@contextmanager
def torchft_diloco(
    replica: Replica, world: World, setting: RunSetting, *, period: int, rate: float, momentum: float
) -> Iterator[Method]:
    from torchft.local_sgd import DiLoCo

    group = world.group_for(setting.backend)
    outer = torch.optim.SGD(replica.model.parameters(), lr=rate, momentum=momentum, nesterov=True)
    with (
        open_manager(replica, world, backend=setting.backend) as manager,
        DiLoCo(manager, [replica.model], replica.optimizer, outer, sync_every=period, backup_device=world.device),
    ):
        common = _CommonPoint(replica, manager)
        yield Method(
            model=replica.model,
            group=group,
            averages=manager.current_step,
            after_step=common.keep_up,
            as_one_model=common.shown,
        )


class _CommonPoint:
    """The parameters after the last outer step: DiLoCo's model, from which the ranks have gone on by themselves."""

    def __init__(self, replica: Replica, manager: Any) -> None:
        self._parameters = list(replica.model.parameters())
        self._manager = manager
        self._step = 0
        self._values = self._copies()

    def keep_up(self) -> None:
        if self._manager.current_step() != self._step:
            self._step = self._manager.current_step()
            self._values = self._copies()

    @contextmanager
    def shown(self) -> Iterator[None]:
        local = self._copies()
        self._assign(self._values)
        yield
        self._assign(local)

    def _copies(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def _assign(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)


_torchft_peer = partial(PeerFramework, extra="torchft", install=INSTALL if HAS_WHEEL else FROM_SOURCE)


def _diloco_peer(name: str, note: str, *, period: int, rate: float, momentum: float) -> PeerFramework:
    return _torchft_peer(
        name=name,
        title="torchft's DiLoCo",
        note=f"{note}: every {period} steps an outer Nesterov step (learning rate {rate:g}, momentum {momentum:g}); "
        "evaluated is the model of the last outer step",
        open_method=partial(torchft_diloco, period=period, rate=rate, momentum=momentum),
    )


TORCHFT_LOCAL_SGD = _torchft_peer(
    name="torchft-local-sgd",
    title="torchft's LocalSGD",
    note=f"as torchft's example has it: parameters averaged every {PERIOD} steps, and at the end of each epoch for the "
    "evaluation; a quorum for each average",
    open_method=partial(torchft_local_sgd, period=PERIOD),
)
TORCHFT_LOCAL_SGD_TUNED = _torchft_peer(
    name="torchft-local-sgd-tuned",
    title="torchft's LocalSGD",
    note=f"parameters averaged every {TUNED_PERIOD} steps and at the end of each epoch; a quorum for each average",
    open_method=partial(torchft_local_sgd, period=TUNED_PERIOD),
)
TORCHFT_DILOCO = _diloco_peer(
    "torchft-diloco",
    "as torchft's example has it",
    period=DILOCO_PERIOD,
    rate=DILOCO_OUTER_RATE,
    momentum=DILOCO_OUTER_MOMENTUM,
)
TORCHFT_DILOCO_TUNED = _diloco_peer(
    "torchft-diloco-tuned",
    "with a shorter memory, for runs of few epochs",
    period=TUNED_PERIOD,
    rate=TUNED_OUTER_RATE,
    momentum=TUNED_OUTER_MOMENTUM,
)
