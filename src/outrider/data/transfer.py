"""Moving a batch to a device, whatever containers it is made of.

Decides when a copy may run behind the host's back. Does not decide where data is kept.
Called by the feeds and by whoever has a batch in hand.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

# Only towards these: a copy to the host that nobody waits for could be read before it has arrived.
_OVERLAPPING = ("cuda", "xpu")


def to_device(batch: Any, device: torch.device | str) -> Any:
    """The same nest of tuples, lists, dicts and named tuples, its tensors on `device`; anything else stays as it is."""
    return _moved(batch, torch.device(device))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=device.type in _OVERLAPPING)
    if callable(getattr(value, "to", None)):  # packed sequences and tokenizers' batches move themselves
        return value.to(device)
    if isinstance(value, Mapping):
        return _with_values(value, {key: _moved(item, device) for key, item in value.items()})
    if isinstance(value, tuple | list):
        return _with_items(value, [_moved(item, device) for item in value])
    return value


def _with_values(like: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if not isinstance(like, MutableMapping):
        return values
    clone = copy.copy(like)  # a mapping type may carry more than its items
    clone.update(values)
    return clone


def _with_items(like: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    if hasattr(like, "_fields"):
        return type(like)(*items)
    return type(like)(items)
