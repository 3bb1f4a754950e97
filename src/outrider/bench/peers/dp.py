"""torch's DataParallel, as its documentation has it: one process, one batch cut into a piece per device.

Decides what DataParallel decides: parameters copied to all devices at every step, outputs gathered on the first.
Collected by `table`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn import DataParallel

from outrider.bench.peers.method import Method
from outrider.bench.peers.peer import Peer
from outrider.machine.devices import parse_devices
from outrider.replica.replica import Replica
from outrider.runtime.rank import RunSetting
from outrider.runtime.world import World


@contextmanager
def data_parallel(replica: Replica, world: World, setting: RunSetting) -> Iterator[Method]:
    indices = [spec.index for spec in parse_devices(setting.devices) if spec.index is not None]
    model = DataParallel(replica.model, device_ids=indices)
    yield Method(model=model, group=None, averages=lambda: replica.steps)


DP = Peer(
    name="dp",
    title="torch DataParallel",
    note="DataParallel at its defaults: one process, the task's batch for each device cut from one of all, "
    "evaluated on the first device",
    open_method=data_parallel,
    processes="one for all",
)
