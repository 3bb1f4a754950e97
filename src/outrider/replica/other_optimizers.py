"""Detects steps of optimizers that were not given to `prepare()` and are not averaged.

Decides whether such an optimizer trains parameters of the prepared models, or others. Does not decide what happens
then. Called by the replica of a user's loop; the loop checks after every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class OtherOptimizers:
    """The last optimizer of each kind that stepped: with parameters of the prepared models, and without."""

    def __init__(self, prepared: Sequence[Optimizer], parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        self._prepared = {id(optimizer) for optimizer in prepared}
        self._parameters = parameters
        self.is_nested = False
        """Whether a prepared optimizer is stepping; it may consist of other optimizers."""
        self.in_prepared: Optimizer | None = None
        """An optimizer that trained parameters of a prepared model with the current batch."""
        self.apart: Optimizer | None = None
        """An optimizer that trains no such parameter."""
        self._hook = register_optimizer_step_pre_hook(self._step_begins)

    def forget(self) -> None:
        """Reset for a new batch."""
        # A failed step has not reset this flag.
        self.in_prepared, self.is_nested = None, False

    def release(self) -> None:
        self._hook.remove()

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._prepared or self.is_nested or optimizer is self.apart:
            return
        known = {id(parameter) for parameter in self._parameters()}
        if any(id(one) in known for group in optimizer.param_groups for one in group["params"]):
            self.in_prepared = optimizer
        else:
            self.apart = optimizer
