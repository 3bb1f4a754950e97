"""Decides how far the common point moves along the averaged displacement: the outer optimizer.

Does not know ranks, wires or buffers beside the three it is given. Called by Exchange, on parameters only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import ConfigError, nearest

KINDS = ("none", "nesterov", "slowmo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    """The outer optimizer; momentum is in units of the averaged displacement d of a window.

    nesterov, as in DiLoCo: v = momentum * v + d, then x += lr * (d + momentum * v).
    slowmo: v = momentum * v + d, then x += lr * v. With the paper's letters (SlowMo, Wang et al. 2020) momentum is
    beta, lr is alpha and v = -gamma * u: the local learning rate gamma is inside d already, which equals the paper
    where gamma is constant and keeps momentum in units of what was really travelled where it is not.
    """

    kind: str = "none"
    lr: float = 1.0
    momentum: float = 0.7

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
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"outer momentum must be >= 0 and < 1, got {self.momentum}", hint="0.7 is a good start")

    @property
    def has_velocity(self) -> bool:
        return self.kind != "none"

    def step(
        self, ref_params: Tensor, mean_delta: Tensor, velocity: Tensor | None, *, is_moving: float | Tensor = 1.0
    ) -> None:
        """Move `ref_params` and `velocity` in place; `mean_delta` is used up.

        `is_moving` is 0 where no rank had samples: then nothing changes. A tensor keeps the device from waiting.
        """
        # Multiply and add stay apart: fused they would round differently on ranks with other processors or threads.
        if velocity is None:
            ref_params.add_(mean_delta)
            return
        velocity.mul_(self.momentum + (1.0 - self.momentum) * (1.0 - is_moving)).add_(mean_delta)
        if self.kind == "nesterov":
            ref_params.add_(mean_delta.mul_(self.lr))
        push = self.lr * self.momentum if self.kind == "nesterov" else self.lr
        torch.mul(velocity, _scalar(push * is_moving, velocity), out=mean_delta)
        ref_params.add_(mean_delta)


def _scalar(value: float | Tensor, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device=like.device)
