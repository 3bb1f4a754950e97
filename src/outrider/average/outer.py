"""Decides how far the common point moves along the averaged displacement: the outer optimizer.

Knows only the three tensors that it is given. Called by Exchange, on parameters only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outrider.errors import ConfigError, nearest

KINDS = ("none", "nesterov", "slowmo")
FOLLOWING = ("auto", "bold")
"""Momenta that depend on the ranks' shares of the samples."""
BOLDEST = 0.75
"""Upper bound of "bold"; higher values were too high in lab runs with few averages (docs/log.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    """The outer optimizer; momentum is in units of the averaged displacement d of a window.

    nesterov, as in DiLoCo: v = momentum * v + d, then x += lr * (d + momentum * v).
    slowmo: v = momentum * v + d, then x += lr * v. In the notation of the paper (SlowMo, Wang et al. 2020) momentum is
    beta, lr is alpha and v = -gamma * u. The displacement d already includes the local learning rate gamma. This equals
    the paper if gamma is constant; if it is not, momentum stays in units of the actual displacement.

    An average moves only as far as the mean rank, although the samples of all ranks were used. With momentum m it moves
    1 / (1 - m) times as far in the long run. "auto" is m = 1 - Σ w_r², where w_r is the rank's share of the samples:
    the average then moves as far per sample as one rank alone. m is 0 for one rank, 0.5 for two equal ranks, 0.41 at
    speeds 1 and 0.4, and 0.875 for eight equal ranks. "bold" uses more momentum with few ranks: m = 1 - (Σ w_r²)² up to
    0.75, and never less than "auto". m is then 0.75 for two equal ranks, 0.65 at speeds 1 and 0.4, and 0.875 for eight.
    """

    kind: str = "none"
    lr: float = 1.0
    momentum: float | Literal["auto", "bold"] = "auto"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            close = nearest(self.kind, KINDS)
            raise ConfigError(
                f"unknown outer optimizer {self.kind!r}, expected one of {', '.join(KINDS)}",
                hint=f"did you mean {close!r}?" if close else None,
            )
        if not self.lr > 0:
            raise ConfigError(
                f"outer lr must be > 0, got {self.lr}", hint="1.0 keeps the averaged displacement as it is"
            )
        if self.momentum not in FOLLOWING and not (isinstance(self.momentum, (int, float)) and 0 <= self.momentum < 1):
            raise ConfigError(
                f"outer momentum must be >= 0 and < 1, got {self.momentum}",
                hint='"auto" and "bold" follow the ranks\' shares of the samples',
            )

    @property
    def has_velocity(self) -> bool:
        return self.kind != "none"

    def look_ahead(self, concentration: float | Tensor) -> float | Tensor:
        """The fraction of the velocity by which the common point is ahead of the average of the ranks.

        Nesterov's step moves the common point ahead of the average. Training continues from there, but evaluation
        should not use that point: the mean of the replicas is better than each replica, and the point ahead of it is
        not (docs/log.md).
        """
        return self.lr * self._momentum(concentration) if self.kind == "nesterov" else 0.0

    def _momentum(self, concentration: float | Tensor) -> float | Tensor:
        if self.momentum == "auto":
            return 1.0 - concentration
        if self.momentum == "bold":
            return _larger(1.0 - concentration, _smaller(1.0 - concentration**2, BOLDEST))
        return self.momentum

    def step(
        self,
        ref_params: Tensor,
        mean_delta: Tensor,
        velocity: Tensor | None,
        *,
        is_moving: float | Tensor = 1.0,
        concentration: float | Tensor = 1.0,
    ) -> None:
        """Move `ref_params` and `velocity` in place; `mean_delta` is overwritten.

        `is_moving` is 0 if no rank had samples; then nothing changes. `concentration` is the sum of the ranks' squared
        shares of the samples. Both may be tensors, so that the host need not wait for the device.
        """
        # Multiply and add separately: fused operations round differently on other processors or thread counts.
        if velocity is None:
            ref_params.add_(mean_delta)
            return
        momentum = self._momentum(concentration)
        velocity.mul_(momentum + (1.0 - momentum) * (1.0 - is_moving)).add_(mean_delta)
        if self.kind == "nesterov":
            ref_params.add_(mean_delta.mul_(self.lr))
        push = self.look_ahead(concentration) if self.kind == "nesterov" else self.lr
        torch.mul(velocity, _scalar(push * is_moving, velocity), out=mean_delta)
        ref_params.add_(mean_delta)


def _smaller(value: float | Tensor, limit: float) -> float | Tensor:
    return value.clamp(max=limit) if isinstance(value, Tensor) else min(value, limit)


def _larger(value: float | Tensor, other: float | Tensor) -> float | Tensor:
    if isinstance(value, Tensor):
        return value.clamp(min=other)
    return max(value, other)


def _scalar(value: float | Tensor, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device=like.device)
