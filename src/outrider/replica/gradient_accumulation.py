"""Cuts a batch into micro-batches, which give the gradient of the whole batch with less memory.

Decides only where to cut. Handles tensors, tuples, lists, named tuples and dicts whose first dimension is the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from outrider.errors import ConfigError

_HINT = (
    "return tensors, tuples, lists or dicts with one row or item per sample from collate; where that is impossible, "
    "use a smaller batch_size, and leave out accumulate and micro_batch"
)


def pieces(data: Any, counts: Sequence[int]) -> Iterator[tuple[Any, int]]:
    """The pieces of a batch, in order, each with its number of samples."""
    if len(counts) == 1:
        yield data, counts[0]
        return
    samples, start = sum(counts), 0
    for count in counts:
        yield _cut(data, start, start + count, samples), count
        start += count


def first_samples(data: Any, count: int, *, samples: int) -> Any:
    """The first samples of a batch."""
    return data if count == samples else _cut(data, 0, count, samples)


def _cut(data: Any, start: int, stop: int, samples: int) -> Any:
    if isinstance(data, torch.Tensor):
        if data.ndim == 0 or data.shape[0] != samples:
            raise _uncuttable(f"it has a tensor of shape {tuple(data.shape)}", samples)
        return data[start:stop]
    if isinstance(data, Mapping):
        return {key: _cut(value, start, stop, samples) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_cut(value, start, stop, samples) for value in data))
    if isinstance(data, (tuple, list)):
        if data and not isinstance(data[0], (torch.Tensor, tuple, list, Mapping)):
            if len(data) != samples:
                raise _uncuttable(f"it has a {type(data).__name__} of {len(data)} items", samples)
            return data[start:stop]  # a column of plain values, such as strings
        return type(data)(_cut(value, start, stop, samples) for value in data)
    raise _uncuttable(f"it has a value of type {type(data).__name__}", samples)


def _uncuttable(reason: str, samples: int) -> ConfigError:
    return ConfigError(f"a batch of {samples} samples cannot be cut into micro-batches: {reason}", hint=_HINT)
