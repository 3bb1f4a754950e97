"""torch's FSDP2 (`fully_shard`) on the same data, schedule and records as the other ways.

Decides what is sharded: every block of a stage, and the rest with the whole model, as torch's documentation has it.
Leaves no model behind: a rank holds a part of one only. Called by scaling.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from outrider.api.options import Order
from outrider.bench.modes import ModeResult
from outrider.bench.peers.method import Method, default_group
from outrider.bench.peers.peer import Peer, obstacle
from outrider.bench.peers.rank import PeerRank
from outrider.bench.scaling.plan import FSDP
from outrider.machine.devices import DeviceSpec
from outrider.replica import recipe as recipes
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica
from outrider.runtime import config as configs
from outrider.runtime.folder import RunFolder
from outrider.runtime.launch import launch
from outrider.runtime.messages import Link
from outrider.runtime.metrics import as_json, from_json
from outrider.runtime.nursery import TRAINING
from outrider.runtime.rank import RunSetting
from outrider.runtime.record import close_record
from outrider.runtime.world import World


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
    yield Method(model=replica.model, group=group, averages=lambda: replica.steps)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for stage in model.children():
        if isinstance(stage, nn.Sequential):
            yield from stage


FSDP2 = Peer(
    name=FSDP,
    title="FSDP2",
    note="fully_shard at its defaults: parameters, gradients and optimizer state in parts, gathered block by block",
    open_method=fully_sharded,
)


def fsdp_obstacle(devices: Sequence[DeviceSpec]) -> str | None:
    """Why it cannot run on these devices; None where it can."""
    return obstacle(FSDP2, devices)


def run_fsdp(order: Order, devices: Sequence[DeviceSpec]) -> ModeResult:
    """Train in new processes and wait for the end."""
    config = order.config
    assert config.run_dir is not None, "benchmarks name their run folders"
    setting = RunSetting(
        folder=config.run_dir,
        origin_s=time.time(),
        # All of one kind: anything else is an obstacle.
        backend="cpu" if devices[0].kind == "cpu" else "nccl",
        devices=tuple(map(str, devices)),
    )
    folder = RunFolder(config.run_dir)
    folder.create()
    payload = {"recipe": order.recipe, "setting": setting, "settings": configs.settings(config)}
    with launch(
        run_fsdp_rank,
        payload,
        devices=devices,
        log_dir=folder.path,
        imports=TRAINING,
        num_threads=config.threads_per_rank,
    ) as ranks:
        epochs = tuple(from_json(message.fields) for message in ranks.messages() if message.kind == "epoch")
        ranks.raise_error()
    close_record(folder, status="finished")
    return ModeResult(mode=FSDP, epochs=epochs, run_dir=folder.path)


def run_fsdp_rank(link: Link, *, recipe: Recipe, setting: RunSetting, settings: dict[str, object]) -> None:
    """What each started process does."""
    options = recipes.settings(recipe) | settings | {"policy": FSDP, "note": FSDP2.note}
    with World.join(link, timeout_s=float(str(settings["timeout_s"]))) as world:
        rank = PeerRank(link, recipe, world=world, setting=setting, options=options)
        with fully_sharded(rank.replica, world, setting) as method:
            for epoch in range(recipe.epochs):
                metrics = rank.run_epoch(epoch, method)
                if world.rank == 0:
                    link.send("epoch", **as_json(metrics))
        world.barrier("the end of the run")
        del rank, method
        # Groups end after what holds them: see the rank of a peer.
        gc.collect()
