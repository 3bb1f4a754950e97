"""Random numbers per sample, on the device: a counter-based hash of (seed, epoch, sample) in integer operations.

Decides the keys of an epoch's samples and the numbers drawn from a key, so that a sample looks the same on every rank.
Uses no generator and never waits for the device. Called by the augmented feed (keys) and by augmentations (numbers).
"""

from __future__ import annotations

from torch import Tensor

from outrider.data.order import mix

# The constants of `mix` (splitmix64) as signed integers, because torch has no arithmetic for unsigned ones.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_NUM_BITS = 24  # as many as a float32 holds exactly


def sample_keys(samples: Tensor, *, seed: int, epoch: int) -> Tensor:
    """The key of each sample (int64, any device) in one epoch: a vectorised `sample_seed`."""
    return _mixed(samples, _signed(mix(seed, epoch)))


def uniform(keys: Tensor, stream: int) -> Tensor:
    """One float32 in [0, 1) per key; numbers from different streams are independent."""
    return _bits(keys, stream).float() * 2.0**-_NUM_BITS


def below(keys: Tensor, stream: int, bound: int) -> Tensor:
    """One int64 in 0 to `bound` - 1 per key; uniform if `bound` is much smaller than 2**24."""
    return (_bits(keys, stream) * bound) >> _NUM_BITS


def _bits(keys: Tensor, stream: int) -> Tensor:
    return _shifted(_mixed(keys, stream), 64 - _NUM_BITS)


def _mixed(values: Tensor, state: int) -> Tensor:
    """One round of `mix`; multiplication wraps around in the same way."""
    mixed = (values ^ state) + _GOLDEN
    mixed = (mixed ^ _shifted(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shifted(mixed, 27)) * _SECOND
    return mixed ^ _shifted(mixed, 31)


def _shifted(values: Tensor, places: int) -> Tensor:
    """A right shift that fills with zeros; torch's own fills with the sign bit."""
    return (values >> places) & ((1 << (64 - places)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
