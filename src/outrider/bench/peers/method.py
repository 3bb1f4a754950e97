"""What a peer does its own way: the model it steps, what follows a step, and when the replicas are one model.

Decides nothing itself; says in one place what the peers may differ in. Data, schedule, throttle, evaluation and
records are the same for all. Each peer's own module opens one; the rank of a peer drives it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore

from outrider.replica.replica import Replica
from outrider.runtime.rank import RunSetting
from outrider.runtime.world import World


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A peer at work in one rank."""

    model: nn.Module
    """What the step function is called with."""
    group: dist.ProcessGroup | None
    """Where rank 0 tells the others its BatchNorm statistics before an evaluation; None in a world of one rank."""
    averages: Callable[[], int]
    """Averages since the start of the run, of gradients or of parameters."""
    backward: Callable[[Tensor], Any] = Tensor.backward
    after_step: Callable[[], None] = _nothing
    epoch: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around the steps of an epoch; what leaving it takes is training time."""
    as_one_model: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around an evaluation and around saving; inside, the replica holds the model that all ranks share."""


class OpenMethod(Protocol):
    """Wraps the replica as the peer's documentation has it, and on the way out takes down what it set up."""

    def __call__(self, replica: Replica, world: World, setting: RunSetting, /) -> AbstractContextManager[Method]: ...


def default_group(world: World, *, backend: str) -> dist.ProcessGroup:
    """Make torch's default group one that fits the ranks' devices, for peers that know no other; returns one like it.

    The world's own is of Gloo, which must not be handed CUDA tensors. Called by all ranks, before any other group.
    """
    if backend == "nccl":
        dist.destroy_process_group()
        dist.init_process_group(
            "nccl",
            store=PrefixStore("peer", world.store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=world.timeout_s),
        )
    return world.group_for(backend)
