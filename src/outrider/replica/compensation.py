"""What makes up for the shorter way of an average: a larger local learning rate, or an outer step.

An average of ranks moves only as far as the mean rank did, though the samples of all were used. Decides which of the
two ways gives that back, and says why; measured in docs/log.md. Called once per replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from outrider.average.outer import Outer

MOMENTUM: dict[str, Literal["auto", "bold"]] = {"cadence": "bold", "async": "auto"}
"""Of the outer step, by policy: with these ResNet-20 learns what it does on one device (docs/log.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compensation:
    """The outer step, whether the learning rate follows the effective number of ranks, and why."""

    outer: Outer
    follows_ranks: bool
    reason: str


def compensate(
    optimizer: torch.optim.Optimizer,
    *,
    policy: str,
    outer: Outer | Literal["auto"],
    lr_scale: float | Literal["auto"],
) -> Compensation:
    """What was asked for; where nothing was, what fits the optimizer."""
    if policy not in MOMENTUM:
        given = Outer() if outer == "auto" else outer
        return Compensation(outer=given, follows_ranks=False, reason=f"{policy} does not average parameters in between")
    if outer != "auto":
        return Compensation(outer=outer, follows_ranks=False, reason=f"outer={outer.kind} was given")
    if lr_scale != "auto":
        return Compensation(outer=Outer(), follows_ranks=False, reason=f"lr_scale={lr_scale:g} was given")
    name = type(optimizer).__name__
    if _normalises(optimizer):
        reason = f"{name} normalises its steps: the learning rate follows the effective number of ranks"
        return Compensation(outer=Outer(), follows_ranks=True, reason=reason)
    outer = Outer(kind="nesterov", momentum=MOMENTUM[policy])
    reason = f"{name} does not normalise its steps: an outer Nesterov step follows the ranks' shares"
    return Compensation(outer=outer, follows_ranks=False, reason=reason)


def _normalises(optimizer: torch.optim.Optimizer) -> bool:
    """Adam and its kin divide by the size of the gradient; the small number that keeps them from 0/0 tells them."""
    return "eps" in optimizer.defaults or "betas" in optimizer.defaults
