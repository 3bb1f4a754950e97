"""Detects parameters that are not finite: a gradient may be NaN or infinite while the loss is finite.

Uses one sum over the flat parameters, which is not finite if any parameter is not, and decides the error message.
Parameters that are not finite stay so. They usually make the next loss not finite, which is checked at every step. So a
check before every average is enough on a CPU. Called by the replicas.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from outrider.average.arena import Arena
from outrider.errors import StepError

GRADIENT_HINT = (
    "a root or logarithm of 0 and a division by 0 have such gradients, and too high a learning rate may; "
    "torch.autograd.set_detect_anomaly(True) names the operation"
)
RATE_HINT = "lower the learning rate, or set max_grad_norm"


class FiniteCheck:
    """Checks all parameters of an arena at once."""

    def __init__(self, arena: Arena) -> None:
        numel = arena.parameter_numel
        self._flats = [flat[: numel[dtype]] for dtype, flat in arena.flats.items() if numel[dtype]]
        # A parameter may be a mask of -inf, which is not an error.
        self._is_on = math.isfinite(float(self._sum()))

    @torch.no_grad()
    def probe(self) -> Tensor | None:
        """A scalar on the parameters' device that is finite if all of them are; None if the check does not apply."""
        return self._sum() if self._is_on else None

    def is_finite(self) -> bool:
        """Whether all parameters are finite; waits for a GPU."""
        probe = self.probe()
        return probe is None or math.isfinite(float(probe))

    def _sum(self) -> Tensor:
        # Half-precision sums would overflow. A sum costs half as much as a norm, and a tenth of one norm per parameter.
        sums = [flat.sum(dtype=torch.float64 if flat.dtype == torch.float64 else torch.float32) for flat in self._flats]
        total = sums[0] if sums else torch.zeros(())
        for one in sums[1:]:
            total = total + one
        return total


class Checked(Protocol):
    """The part of a replica that this module uses."""

    finite: FiniteCheck
    arena: Arena
    rank: int
    name: str
    steps: int


def check_update(replica: Checked) -> None:
    """Raise an error if parameters are not finite after the last step; its gradients show the cause.

    If gradients are gone, as after `zero_grad` in a user's loop, they are assumed to be the cause.
    """
    if replica.finite.is_finite():
        return
    step = max(0, replica.steps - 1)
    gradients = _gradients(replica)
    if not gradients or any(not bool(torch.isfinite(gradient).all()) for gradient in gradients):
        raise gradient_not_finite(rank=replica.rank, name=replica.name, step=step)
    raise StepError(
        f"rank {replica.rank} ({replica.name}), step {step}: the parameters are not finite after the update",
        hint=RATE_HINT,
        rank=replica.rank,
        step=step,
    )


def _gradients(replica: Checked) -> list[Tensor]:
    gradients = [parameter.grad for parameter in replica.arena.parameters]
    return [gradient for gradient in gradients if gradient is not None]


def gradient_not_finite(*, rank: int, name: str, step: int) -> StepError:
    return StepError(
        f"rank {rank} ({name}), step {step}: the gradient is not finite", hint=GRADIENT_HINT, rank=rank, step=step
    )


def average_not_finite(*, rank: int, name: str) -> StepError:
    """The error of a rank whose displacement was not finite; only that rank itself knows the step."""
    return StepError(
        f"rank {rank} ({name}): its parameters were not finite at an average", hint=GRADIENT_HINT, rank=rank
    )


def refuse_to_save(replica: Checked) -> None:
    """Raise an error instead of saving parameters that are not finite; earlier checkpoints stay."""
    if not replica.finite.is_finite():
        raise StepError(
            f"rank {replica.rank} ({replica.name}), step {replica.steps}: the parameters are not finite, so no "
            "checkpoint is written",
            hint="no step of the optimizer made them so: look at what else changes them, such as a callback",
            rank=replica.rank,
            step=replica.steps,
        )
