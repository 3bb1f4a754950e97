"""torch's DistributedDataParallel, as its documentation has it.

Decides what DDP decides: gradients averaged at every step. Collected by `table`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.parallel import DistributedDataParallel

from outrider.bench.peers.method import Method
from outrider.bench.peers.peer import Peer
from outrider.replica.replica import Replica
from outrider.runtime.rank import RunSetting
from outrider.runtime.world import World


@contextmanager
def distributed_data_parallel(replica: Replica, world: World, setting: RunSetting) -> Iterator[Method]:
    group = world.group_for(setting.backend)
    model = DistributedDataParallel(replica.model, process_group=group)
    yield Method(model=model, group=group, averages=lambda: replica.steps)


DDP = Peer(
    name="ddp",
    title="torch DDP",
    note="DistributedDataParallel at its defaults: gradients averaged at every step, rank 0's buffers sent before it",
    open_method=distributed_data_parallel,
)
