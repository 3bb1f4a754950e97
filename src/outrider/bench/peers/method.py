"""The interface in which peers differ: the model, the work after a step, and when replicas become one model.

Data, schedule, throttle, evaluation and records are the same for all peers. Each peer's module implements it; the rank
of a peer calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore

from outrider.rank.rank_life import RunSetting
from outrider.replica.replica import Replica
from outrider.world.world import World


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A peer at work in one rank."""

    model: nn.Module
    """The model that is passed to the step function."""
    group: dist.ProcessGroup | None
    """Group for the broadcast of rank 0's BatchNorm statistics before an evaluation; None with one rank."""
    averages: Callable[[], int]
    """Averages since the start of the run, of gradients or of parameters."""
    backward: Callable[[Tensor], Any] = Tensor.backward
    after_step: Callable[[], None] = _nothing
    epoch: Callable[[], AbstractContextManager[Any]] = nullcontext
    """A context around the steps of an epoch; leaving it counts as training time."""
    as_one_model: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around an evaluation and around saving; inside, the replica holds the model that all ranks share."""
    holds_whole_model: bool = True
    """False if a rank holds only a part of the model; then none is saved."""


OpenMethod = Callable[[Replica, World, RunSetting], AbstractContextManager[Method]]
"""Wraps the replica as in the peer's documentation, and undoes its set-up at the end."""


def default_group(world: World, *, backend: str) -> dist.ProcessGroup:
    """Make torch's default group one that fits the ranks' devices, for peers that know no other; returns one like it.

    The world's own is of Gloo, which must not be handed CUDA tensors. Called by all ranks, before any other group.
    """
    if backend == "nccl":
        dist.destroy_process_group()
        dist.init_process_group(
            "nccl",
            store=PrefixStore("peer", world.group_store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=world.timeout_s),
        )
    return world.group_for(backend)
