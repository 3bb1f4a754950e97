"""Whether the gradients of a user's loop are those of the last average, so that an optimizer may step with them.

Decides nothing but that, from the user's calls alone, so that all ranks find the same. Used by the user's loop.
"""

from __future__ import annotations

import torch


class AveragedGradients:
    """After `s.backward` gradients are averaged until an optimizer steps; those of other optimizers for longer.

    What the user does to gradients before the first step after an average, clipping for instance, is meant to stay.
    After that step only gradients that nobody has touched are known to be the averaged ones.
    """

    def __init__(self) -> None:
        self._is_fresh = False
        self._untouched: dict[int, tuple[torch.Tensor | None, int]] = {}
        """After a step: the gradient of each parameter, by id, and its version."""

    def saw_average(self) -> None:
        self._is_fresh, self._untouched = True, {}

    def forget(self) -> None:
        """Gradients of this rank alone were added, or the batch is over."""
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
        """An optimizer is about to step with averaged gradients; of the others, theirs stay what they are."""
        self._is_fresh = False
        if len(optimizers) > 1:
            owned = [one for each in optimizers for one in _parameters_of(each)]
            self._untouched = {id(one): (one.grad, _version(one.grad)) for one in owned}


def _version(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
