"""What both strategies, of Fabric and of the Trainer, ask of the ranks.

Decides nothing: every member passes a question of Lightning on. Comes before Lightning's own class among the bases of a
strategy, so that its members are used instead of the abstract ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.integrations.lightning_ranks import LightningRanks


class RankAnswers:
    """Rank, device and world of a strategy, and its collectives."""

    accelerator: Any
    _ranks: LightningRanks
    parallel_devices: list[torch.device] | None = None
    """Set by Lightning, from `accelerator` and `devices`."""

    @property
    def root_device(self) -> torch.device:
        return self._ranks.device

    @property
    def is_global_zero(self) -> bool:
        return self._ranks.rank == 0

    @property
    def global_rank(self) -> int:
        return self._ranks.rank

    @property
    def local_rank(self) -> int:
        return self._ranks.local_rank

    @property
    def node_rank(self) -> int:
        return self._ranks.node_rank

    @property
    def world_size(self) -> int:
        return self._ranks.world_size

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return self._ranks.all_gather(tensor, sync_grads=sync_grads)

    def barrier(self, name: str | None = None) -> None:
        self._ranks.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._ranks.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self._ranks.decide(decision, all=all)

    def setup_environment(self) -> None:
        # The device of a rank need not be of the accelerator's kind: GPU and CPU train together, and --devices comes
        # before what the script says. The session has made it the current device.
        if self.accelerator is not None and self.accelerator.name() == self.root_device.type:
            self.accelerator.setup_device(self.root_device)
