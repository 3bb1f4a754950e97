"""Cuts a batch into pieces for `accumulate`: the gradient stays that of the whole batch, the memory is a piece's.

Decides only where to cut; knows tensors, tuples, lists, named tuples and dicts whose first dimension is the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from outrider.core.split import even
from outrider.errors import ConfigError


def pieces(data: Any, samples: int, parts: int) -> Iterator[tuple[Any, int]]:
    """At most `parts` pieces of nearly equal size, each with its number of samples."""
    start = 0
    for count in even(samples, parts):
        if count:
            yield _cut(data, start, start + count), count
        start += count


def _cut(data: Any, start: int, stop: int) -> Any:
    if isinstance(data, torch.Tensor):
        return data[start:stop]
    if isinstance(data, Mapping):
        return {key: _cut(value, start, stop) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_cut(value, start, stop) for value in data))
    if isinstance(data, (tuple, list)):
        if data and not isinstance(data[0], (torch.Tensor, tuple, list, Mapping)):
            return data[start:stop]  # a column of plain values, such as strings
        return type(data)(_cut(value, start, stop) for value in data)
    raise ConfigError(
        f"accumulate cannot cut a batch of type {type(data).__name__}",
        hint="return tensors, tuples, lists or dicts from collate, or leave accumulate out",
    )
