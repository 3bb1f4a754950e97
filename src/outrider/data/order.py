"""In which order an epoch's samples come, and the seed of each sample's randomness.

Decides by hashing alone, so ranks with different torch releases agree without talking to each other.
Knows neither ranks nor batches. Called by the drivers (order) and by the feeds (sample seeds).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def shuffled(num_samples: int, *, seed: int, epoch: int) -> Tensor:
    """The permutation of one epoch: every index once, int64, the same on every rank."""
    # Sorting hashed keys instead of torch.randperm: its algorithm may change between torch releases.
    keys = np.arange(1, num_samples + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(mix(seed, epoch))
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(_FIRST)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(_SECOND)
    keys = keys ^ (keys >> np.uint64(31))
    return torch.from_numpy(np.argsort(keys, kind="stable").astype(np.int64))


def in_order(num_samples: int) -> Tensor:
    """The data set's own order, int64."""
    return torch.arange(num_samples, dtype=torch.int64)


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """64 bits for the augmentation of one sample in one epoch, whoever takes it."""
    return mix(seed, epoch, index)


def mix(*values: int) -> int:
    """Hash integers, in order, to 64 well mixed bits (splitmix64, Steele et al. 2014)."""
    state = 0
    for value in values:
        state = ((state ^ (value & _MASK)) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state
