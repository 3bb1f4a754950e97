"""Compensates for averaging: adds an outer Nesterov step, or scales the learning rate if requested.

An average of ranks moves only as far as the mean rank, although the samples of all ranks were used. Decides which of
the two compensates for that, with the reason; docs/log.md has the measurements. Called once per replica.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from outrider.average.outer import Outer
from outrider.policy.policies import PolicySpec, policy_spec

BOLD_FROM = 20
"""Least batches of the slowest rank in a window for "bold" momentum. ResNet-20 gained half a point with it in windows
of 20 (docs/log.md); with windows of 2 and 5 steps it spoils training (docs/results/learning)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compensation:
    """The outer step, whether the learning rate is scaled by the effective number of ranks, and the reason."""

    outer: Outer
    follows_ranks: bool
    reason: str


def compensate(
    optimizer: torch.optim.Optimizer,
    *,
    policy: str | PolicySpec,
    outer: Outer | Literal["auto"],
    lr_scale: float | Literal["auto"],
    shortest_window: int = BOLD_FROM,
) -> Compensation:
    """Use the options of the user; by default an outer step for optimizers that do not normalise their steps.

    An `lr_scale` of 1 is the default and counts as not set. `shortest_window` is the least number of batches of the
    slowest rank between two averages.
    """
    spec = policy_spec(policy)
    if spec.outer_momentum is None:
        return _without(spec, Outer() if outer == "auto" else outer)
    if outer != "auto":
        return Compensation(outer=outer, follows_ranks=False, reason=f"outer={outer.kind} was given")
    if lr_scale not in ("auto", 1.0):
        return Compensation(outer=Outer(), follows_ranks=False, reason=f"lr_scale={lr_scale:g} was given")
    name = type(optimizer).__name__
    if _normalises(optimizer):
        return _for_normalised_steps(name, lr_scale)
    outer = Outer(kind="nesterov", momentum=spec.outer_momentum)
    reason = f"{name} does not normalise its steps: an outer Nesterov step follows the ranks' shares"
    if outer.momentum == "bold" and shortest_window < BOLD_FROM:
        outer = replace(outer, momentum="auto")
        reason += f", with less momentum, as windows may be shorter than {BOLD_FROM} batches"
    return Compensation(outer=outer, follows_ranks=False, reason=reason)


def _without(spec: PolicySpec, outer: Outer) -> Compensation:
    averages_windows = spec.averages and not spec.shares_steps
    reason = "asks for no compensation" if averages_windows else "does not average parameters in between"
    return Compensation(outer=outer, follows_ranks=False, reason=f"{spec.name} {reason}")


def _for_normalised_steps(name: str, lr_scale: float | Literal["auto"]) -> Compensation:
    if lr_scale == "auto":
        reason = f"{name} normalises its steps: the learning rate follows the effective number of ranks"
        return Compensation(outer=Outer(), follows_ranks=True, reason=reason)
    reason = f'{name} normalises its steps: nothing is compensated unless lr_scale="auto" is passed'
    return Compensation(outer=Outer(), follows_ranks=False, reason=reason)


def _normalises(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer divides by the size of the gradient, like Adam (it has `eps` or `betas`)."""
    return "eps" in optimizer.defaults or "betas" in optimizer.defaults
