"""Arrays of all ranks on all ranks: their shapes travel as JSON and their numbers as bytes, never as objects.

Decides which arrays can travel: those of numbers, in lists, tuples and dicts. Used by the integrations of
transformers and accelerate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from outrider.errors import ConfigError
from outrider.world.world import World

_NUMBERS = "biufc"
"""Kinds of NumPy types that are numbers."""


class RankArrays:
    """Gathers nested arrays over the ranks of a world."""

    def __init__(self, world: World) -> None:
        """All ranks call this."""
        self._world = world
        self._group = world.group_for("cpu")

    def gather(self, nested: Any) -> list[Any]:
        """The arrays of all ranks, in the order of ranks; all ranks call this."""
        mine: list[np.ndarray[Any, Any]] = []
        told = self._world.exchange_json(_described(nested, mine), name="arrays", what="arrays of all ranks")
        return [self._of(rank, description, mine) for rank, description in enumerate(told)]

    def _of(self, rank: int, description: Any, mine: list[np.ndarray[Any, Any]]) -> Any:
        source = iter(mine)

        def received(dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
            own = next(source) if rank == self._world.rank else None
            array = np.empty(shape, dtype) if own is None else np.array(own, order="C")
            if array.nbytes:
                dist.broadcast(torch.from_numpy(array.reshape(-1).view(np.uint8)), src=rank, group=self._group)
            return array

        return _rebuilt(description, received)


def _described(nested: Any, found: list[np.ndarray[Any, Any]]) -> Any:
    """The structure for JSON; the arrays are appended to `found`."""
    if nested is None:
        return None
    if isinstance(nested, dict):
        return {"dict": [[str(name), _described(one, found)] for name, one in nested.items()]}
    if isinstance(nested, tuple | list):
        return {"tuple" if isinstance(nested, tuple) else "list": [_described(one, found) for one in nested]}
    array = np.asarray(nested)
    if array.dtype.kind not in _NUMBERS:
        # Told rather than raised, because the other ranks wait for an answer.
        return {"refused": f"{type(nested).__name__} of {array.dtype}"}
    found.append(array)
    return {"dtype": array.dtype.str, "shape": list(array.shape)}


def _rebuilt(description: Any, received: Any) -> Any:
    match description:
        case {"refused": what}:
            raise ConfigError(
                f"values for all ranks contain a {what}, which cannot be sent",
                hint="pass tensors of numbers, also from prediction_step() and preprocess_logits_for_metrics",
            )
        case {"dict": pairs}:
            return {name: _rebuilt(one, received) for name, one in pairs}
        case {"tuple": parts}:
            return tuple(_rebuilt(one, received) for one in parts)
        case {"list": parts}:
            return [_rebuilt(one, received) for one in parts]
        case {"dtype": dtype, "shape": shape}:
            return received(dtype, shape)
    return None
