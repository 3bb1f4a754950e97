"""torch's FSDP2 (`fully_shard`) as a peer: the same data, schedule and records as the other ways.

Decides what is sharded: every block of a stage, and the rest with the whole model, as in torch's documentation. It is
no mode of the suite, because ranks that evaluate unequal numbers of batches would wait for each other's parameters.
Called by `scaling_measure`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from outrider.bench.peers.method import Method, default_group
from outrider.bench.peers.peer import PeerFramework
from outrider.bench.scaling.scaling_plan import FSDP
from outrider.rank.rank_life import RunSetting
from outrider.replica.replica import Replica
from outrider.world.world import World


@contextmanager
def fully_sharded(replica: Replica, world: World, setting: RunSetting) -> Iterator[Method]:
    """The replica's model in parts; the optimizer is made again, for the parameters are others now."""
    group = default_group(world, backend=setting.backend)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in _blocks(replica.model):
        fully_shard(block, mesh=mesh)
    fully_shard(replica.model, mesh=mesh)
    replica.optimizer = replica.recipe.optimizer(replica.model.parameters())
    # It would keep the whole parameters alive.
    del replica.arena
    yield Method(model=replica.model, group=group, averages=lambda: replica.steps, holds_whole_model=False)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for stage in model.children():
        if isinstance(stage, nn.Sequential):
            yield from stage


FSDP2 = PeerFramework(
    name=FSDP,
    title="FSDP2",
    note="fully_shard at its defaults: parameters, gradients and optimizer state in parts, gathered block by block",
    open_method=fully_sharded,
)
