"""A small classifier whose build can be slowed on purpose: SLOWED=1 repeats a part of the forward pass."""

from __future__ import annotations

import os

from torch import Tensor, nn


class Slowable(nn.Module):
    """Two linear layers; the first is computed again where the build is slowed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 16 * 16, 64)
        self.second = nn.Linear(64, 10)
        self.num_repeats = 1 + int(os.environ.get("SLOWED", "0"))

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        for _ in range(self.num_repeats):
            hidden = self.first(flat).relu()
        logits: Tensor = self.second(hidden)
        return logits


def classifier() -> nn.Module:
    return Slowable()
