"""The random generators that data sets draw from: Python's, NumPy's and torch's on the CPU.

Seeds, captures and puts them back. Leaves the generators of accelerators alone: dropout draws from those.
Called by the drawer, around every sample.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RandomStates:
    """Where the three generators stand."""

    python: Any
    numpy: dict[str, Any]
    torch: Tensor

    def equals(self, other: RandomStates) -> bool:
        # NumPy advances `pos` with every draw and rewrites `key` only every 624, so both must be compared.
        mine, theirs = self.numpy["state"], other.numpy["state"]
        return (
            self.python == other.python
            and mine["pos"] == theirs["pos"]
            and self.numpy["has_gauss"] == other.numpy["has_gauss"]
            and np.array_equal(mine["key"], theirs["key"])
            and torch.equal(self.torch, other.torch)
        )


def capture() -> RandomStates:
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return RandomStates(python=random.getstate(), numpy=numpy_state, torch=torch.default_generator.get_state())


def restore(states: RandomStates) -> None:
    random.setstate(states.python)
    np.random.set_state(states.numpy)
    torch.default_generator.set_state(states.torch)


def seed_all(value: int) -> None:
    """Seed the three generators from one 64-bit value."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    # Not torch.manual_seed: that would seed the accelerators too.
    torch.default_generator.manual_seed(value)


@contextmanager
def preserved() -> Iterator[None]:
    """Whatever is drawn inside, the generators go on afterwards as if nothing had been."""
    states = capture()
    try:
        yield
    finally:
        restore(states)
