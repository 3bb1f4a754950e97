"""Scales losses for fp16, in which small gradients would be zero, and detects steps whose gradients overflowed.

Decides the scale: halved at an overflow, doubled after many steps without one, as in torch's GradScaler. Gradients are
unscaled before they are averaged or clipped, so ranks may have different scales. The replica decides whether to skip a
local step; all ranks together decide it for a shared step. Waits for a GPU at every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FIRST_SCALE = 2.0**16
STEPS_TO_GROW = 2_000
"""Steps without an overflow after which the scale is doubled."""


class LossScale:
    """The scale of one rank; a power of two, so that scaling loses no precision."""

    def __init__(self) -> None:
        self.value = FIRST_SCALE
        self.has_overflow = False
        """Whether the last gradient had an infinity or NaN."""
        self.num_skipped = 0
        self._num_good = 0

    def scaled(self, loss: Tensor) -> Tensor:
        # In fp16 the scaled loss itself could overflow.
        return loss.float() * self.value if loss.dtype in (torch.float16, torch.bfloat16) else loss * self.value

    @torch.no_grad()
    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the scale, and check whether all are finite."""
        dense = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
        self.has_overflow = False
        if not dense:
            return
        torch._foreach_mul_(dense, 1 / self.value)
        largest = torch.stack([norm.float() for norm in torch._foreach_norm(dense, math.inf)])
        self.has_overflow = not bool(largest.isfinite().all())

    @property
    def is_hopeless(self) -> bool:
        """Whether gradients overflowed although the loss was not scaled up: then they are wrong, not just large."""
        return self.has_overflow and self.value <= 1.0

    def took_step(self) -> None:
        """Count a step that was taken; may double the scale."""
        self._num_good += 1
        if self._num_good >= STEPS_TO_GROW:
            self.value, self._num_good = self.value * 2, 0

    def skipped_step(self) -> None:
        """Count a step skipped because of any rank's gradient; halves the scale if this rank's overflowed."""
        self.num_skipped += 1
        if self.has_overflow:
            self.value, self._num_good = self.value / 2, 0

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "num_good": self._num_good, "num_skipped": self.num_skipped}

    def restore(self, state: dict[str, Any]) -> None:
        self.value, self._num_good = state["value"], state["num_good"]
        self.num_skipped = state["num_skipped"]
