"""The order of an epoch's samples, and the seed of each sample's randomness.

Uses hashing only, so ranks with different torch releases agree without communication. Knows neither ranks nor
batches. Called by `rank` and the lab (order) and by the feeds (sample seeds).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outrider.errors import DataError
from outrider.policy.remaining import Remaining

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def shuffled(num_samples: int, *, seed: int, epoch: int) -> Tensor:
    """The permutation of one epoch: every index once, int64, the same on every rank."""
    # Sort hashed keys instead of calling torch.randperm, whose algorithm may change between torch releases.
    keys = np.arange(1, num_samples + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(mix(seed, epoch))
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(_FIRST)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(_SECOND)
    keys = keys ^ (keys >> np.uint64(31))
    return torch.from_numpy(np.argsort(keys, kind="stable").astype(np.int64))


def in_order(num_samples: int) -> Tensor:
    """The data set's own order, int64."""
    return torch.arange(num_samples, dtype=torch.int64)


def with_rest(order: Tensor, remaining: Remaining) -> Tensor:
    """The order of an epoch whose last segment ended early: done positions first, then the remaining ones in order."""
    if remaining.is_in_order:
        return order
    rest = [order[piece.start : piece.stop] for piece in remaining.pieces]
    # Positions that are done are only counted, not read again, so their order does not matter.
    return torch.cat([order[: remaining.position], *rest])


def num_kept(num_samples: int, *, drop_last: bool, unit: int) -> int:
    """The number of samples in an epoch: all, or with drop_last those that fill steps of `unit` samples."""
    kept = num_samples - num_samples % unit if drop_last else num_samples
    if not kept:
        raise DataError(
            f"drop_last=True leaves nothing of {num_samples} samples: a step of all ranks takes {unit}",
            hint="lower batch_size, or leave drop_last out",
        )
    return kept


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """A 64-bit seed for the augmentation of one sample in one epoch, the same on every rank."""
    return mix(seed, epoch, index)


def mix(*values: int) -> int:
    """Hash a sequence of integers to 64 well-mixed bits (splitmix64, Steele et al. 2014)."""
    state = 0
    for value in values:
        state = ((state ^ (value & _MASK)) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state
