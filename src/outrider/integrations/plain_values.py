"""Values that frameworks broadcast, as JSON: a rank never loads what would run code.

Decides which values can travel: numbers, text, paths, tensors, and lists, tuples and dicts of them. Used by the
strategies for Lightning.
"""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

import torch

from outrider.errors import ConfigError

Told = Any
"""What json can write."""


def as_told(value: Any) -> Told:
    """The value for JSON; one that cannot travel becomes the name of its type."""
    try:
        return {"value": _written(value)}
    except TypeError as error:
        return {"refused": str(error)}


def from_told(told: Told) -> Any:
    """The value again; raises on every rank where it could not travel."""
    if "refused" in told:
        raise ConfigError(
            f"broadcast() cannot send a {told['refused']} to other ranks",
            hint="pass numbers, text, paths, tensors, or lists, tuples and dicts of them",
        )
    return _read(told["value"])


def _written(value: Any) -> Told:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if isinstance(value, torch.Tensor):
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_written(one) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_written(name), _written(one)] for name, one in value.items()]}
    raise TypeError(type(value).__name__)


def _read(told: Told) -> Any:
    match told:
        case {"path": text}:
            return Path(text)
        case {"tensor": numbers, "dtype": name}:
            return torch.tensor(numbers, dtype=getattr(torch, name))
        case {"list": parts}:
            return [_read(one) for one in parts]
        case {"tuple": parts}:
            return tuple(_read(one) for one in parts)
        case {"dict": pairs}:
            return {_read(name): _read(one) for name, one in pairs}
    return told
