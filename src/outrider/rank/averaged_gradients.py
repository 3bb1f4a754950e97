"""Tells whether the gradients of a user's loop come from the last average, so that an optimizer may step with them.

Decides only that, and only from the user's calls, so that all ranks decide the same. Used by the user's loop.
"""

from __future__ import annotations

import torch


class AveragedGradients:
    """After `s.backward` gradients count as averaged until an optimizer steps; those of other optimizers longer.

    Changes that the user makes before the first step after an average, such as clipping, are meant to stay. After that
    step, only untouched gradients are known to be averaged.
    """

    def __init__(self) -> None:
        self._is_fresh = False
        self._untouched: dict[int, tuple[torch.Tensor | None, int]] = {}
        """After a step: the gradient of each parameter, by id, and its version."""

    def saw_average(self) -> None:
        self._is_fresh, self._untouched = True, {}

    def forget(self) -> None:
        """Note that local gradients were added, or that the batch is over."""
        self._is_fresh, self._untouched = False, {}

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer may step without another average."""
        if self._is_fresh:
            return True
        if not self._untouched:
            return False
        return all(self._is_untouched(one) for one in _parameters_of(optimizer))

    def _is_untouched(self, parameter: torch.Tensor) -> bool:
        gradient, version = self._untouched.get(id(parameter), (None, -1))
        return gradient is parameter.grad and version == _version(parameter.grad)

    def saw_step(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        """Note that an optimizer is about to step with averaged gradients; remember those of the other optimizers."""
        self._is_fresh = False
        if len(optimizers) > 1:
            owned = [one for each in optimizers for one in _parameters_of(each)]
            self._untouched = {id(one): (one.grad, _version(one.grad)) for one in owned}


def _version(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
