"""The interface of a replica that `RankLife` needs, independent of what takes the steps.

`Replica` takes its own steps: eager, compiled or captured. In a `LoopReplica` the user's loop takes them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import nn

from outrider.average.arena import Arena
from outrider.replica.averaging_compensation import Compensation
from outrider.replica.finite import FiniteCheck
from outrider.replica.logged_scalars import LoggedScalars
from outrider.replica.loss_sums import LossSums
from outrider.replica.recipe import LoopRecipe


class RankReplica(Protocol):
    """Model, optimizers and schedules of one rank."""

    device: torch.device
    rank: int
    name: str
    model: nn.Module
    arena: Arena
    finite: FiniteCheck
    compensation: Compensation
    loss_sums: LossSums
    logged_scalars: LoggedScalars
    steps: int

    @property
    def recipe(self) -> LoopRecipe: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]: ...

    @property
    def learning_rate(self) -> float: ...

    @property
    def is_compiled(self) -> bool:
        """Whether torch has compiled the model or the step, for a fixed number of threads."""
        ...

    @property
    def can_overlap(self) -> bool:
        """Whether the all-reduce of gradients may begin while the backward pass still computes others."""
        ...

    def saw_ranks(self, effective_ranks: float) -> None: ...

    def follow_schedule(self, at: int) -> None: ...

    def check_loss(self) -> None: ...

    def check_finite(self) -> None: ...

    def watch_loss(self) -> None: ...

    def lay_out(self, *, changing: Collection[str], trained: Collection[str] | None) -> None: ...

    def forget_captures(self) -> None: ...

    def identity(self) -> dict[str, Any]:
        """The settings that must be equal in a resumed run."""
        ...

    def state(self) -> dict[str, Any]:
        """The state of this rank, for a checkpoint."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...

    def loop_state(self) -> dict[str, Any]:
        """What the user's loop changes besides parameters and optimizer state; empty if there is no such loop."""
        ...

    def take_loop_state(self, state: dict[str, Any], *, at: int) -> None:
        """Continue as the rank that trained alone, `at` these samples of the world."""
        ...
