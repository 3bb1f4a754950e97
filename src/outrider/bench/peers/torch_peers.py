"""torch's own ways as peers: DistributedDataParallel, DataParallel and post-local SGD, used as in their documentation.

DDP averages gradients at every step. DataParallel splits one batch among the devices of one process. Post-local SGD is
DDP during the warm-up, then local steps with parameters averaged every few steps. Listed in `peer_table`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters_or_parameter_groups
from torch.nn import DataParallel
from torch.nn.parallel import DistributedDataParallel

from outrider.bench.peers.method import Method, default_group
from outrider.bench.peers.peer import PeerFramework
from outrider.machine.devices import parse_devices
from outrider.rank.rank_life import RunSetting
from outrider.replica.replica import Replica
from outrider.world.world import World


@contextmanager
def distributed_data_parallel(replica: Replica, world: World, setting: RunSetting) -> Iterator[Method]:
    group = world.group_for(setting.backend)
    model = DistributedDataParallel(replica.model, process_group=group)
    yield Method(model=model, group=group, averages=lambda: replica.steps)


DDP = PeerFramework(
    name="ddp",
    title="torch DDP",
    note="DistributedDataParallel at its defaults: gradients averaged at every step, rank 0's buffers sent before it",
    open_method=distributed_data_parallel,
)


@contextmanager
def data_parallel(replica: Replica, world: World, setting: RunSetting) -> Iterator[Method]:
    indices = [spec.index for spec in parse_devices(setting.devices) if spec.index is not None]
    model = DataParallel(replica.model, device_ids=indices)
    yield Method(model=model, group=None, averages=lambda: replica.steps)


DP = PeerFramework(
    name="dp",
    title="torch DataParallel",
    note="DataParallel at its defaults: one process, the task's batch for each device cut from one of all, "
    "evaluated on the first device",
    open_method=data_parallel,
    processes="one for all",
)


# Of the example in torch's documentation.
WARM_UP_STEPS = 100
PERIOD = 4
TUNED_PERIOD = 20


@contextmanager
def post_local_sgd(
    replica: Replica,
    world: World,
    setting: RunSetting,
    *,
    period: int,
    broadcast_buffers: bool = True,
    post_local_gradient_allreduce: bool = True,
) -> Iterator[Method]:
    """The last two are torch's own options with torch's own defaults."""
    # Compiles its scripted optimizers when it is imported: seconds that only these ranks should pay.
    from torch.distributed.optim import PostLocalSGDOptimizer

    group = default_group(world, backend=setting.backend)
    model = DistributedDataParallel(replica.model, process_group=group, broadcast_buffers=broadcast_buffers)
    # By default the subgroups are the machines, and on a single one nothing would be local: here each rank is its own.
    subgroup, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(group, subgroup, WARM_UP_STEPS, post_local_gradient_allreduce)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=period, warmup_steps=WARM_UP_STEPS, process_group=group)
    replica.optimizer = PostLocalSGDOptimizer(replica.optimizer, averager)
    ends = _EpochEnds(replica, group)
    yield Method(
        model=model,
        group=group,
        averages=lambda: num_averages(averager.step, period=period) + ends.num_averages,
        epoch=ends.epoch,
    )


class _EpochEnds:
    """Averages the parameters at the end of each epoch: torch leaves it open what is evaluated between two averages."""

    def __init__(self, replica: Replica, group: dist.ProcessGroup) -> None:
        self.num_averages = 0
        self._replica = replica
        self._group = group

    @contextmanager
    def epoch(self) -> Iterator[None]:
        yield
        average_parameters_or_parameter_groups(self._replica.model.parameters(), self._group)
        self.num_averages += 1


def num_averages(steps: int, *, period: int) -> int:
    """Of gradients at each step of the warm-up, then of parameters, beginning with the first step after it."""
    return min(steps, WARM_UP_STEPS) + math.ceil(max(0, steps - WARM_UP_STEPS) / period)


POST_LOCAL_SGD = PeerFramework(
    name="post-local-sgd",
    title="torch's post-local SGD",
    note=f"as torch's documentation has it: {WARM_UP_STEPS} steps of DDP, then averages every {PERIOD} steps; "
    "also at the end of each epoch, for the evaluation; each rank stands for a machine of its own",
    open_method=partial(post_local_sgd, period=PERIOD),
)
POST_LOCAL_SGD_TUNED = PeerFramework(
    name="post-local-sgd-tuned",
    title="torch's post-local SGD",
    note=f"{WARM_UP_STEPS} steps of DDP, then parameters averaged every {TUNED_PERIOD} steps and at the end of each "
    "epoch; nothing is sent in between (broadcast_buffers and post_local_gradient_allreduce off)",
    open_method=partial(
        post_local_sgd, period=TUNED_PERIOD, broadcast_buffers=False, post_local_gradient_allreduce=False
    ),
)
