"""A copy of one rank's own state before a merge: parameters, float buffers, counters, averaged optimizer state.

Does not decide when ranks merge. A checkpoint in the middle of an epoch contains the copy, so that a run that is saved
or resumed there is bit-identical to an uninterrupted run. Called by the averages of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.average.arena import Arena
from outrider.average.exchange import Exchange
from outrider.average.optimizer_state import OptimizerArena


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnArena:
    """The copy, in host memory."""

    flats: dict[str, Tensor]
    integers: list[Tensor]
    common: dict[str, Any]
    """The corresponding state of the exchange."""
    optimizer: dict[str, Tensor]
    samples: int
    """Samples of this rank since the previous merge."""

    @classmethod
    @torch.no_grad()
    def of(cls, arena: Arena, common: dict[str, Any], optimizer: OptimizerArena | None, *, samples: int) -> OwnArena:
        arena.reclaim()
        return cls(
            flats=_copies(arena.flats),
            integers=[tensor.to("cpu", copy=True) for tensor in arena.integers],
            common=common,
            optimizer={} if optimizer is None else _copies(optimizer.flats),
            samples=samples,
        )

    @torch.no_grad()
    def put_back(self, arena: Arena, exchange: Exchange, optimizer: OptimizerArena | None) -> None:
        arena.reclaim()
        _write(arena.flats, self.flats)
        for tensor, kept in zip(arena.integers, self.integers, strict=True):
            tensor.copy_(kept)
        if optimizer is not None and self.optimizer:
            optimizer.reclaim()
            _write(optimizer.flats, self.optimizer)
        exchange.load_state_dict(self.common)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint; the checkpoint contains the state of optimizer and exchange already."""
        return {"flats": self.flats, "integers": self.integers, "samples": self.samples}

    @classmethod
    def restored(cls, state: dict[str, Any], common: dict[str, Any]) -> OwnArena:
        return cls(
            flats=state["flats"],
            integers=state["integers"],
            common=common,
            optimizer={},
            samples=state["samples"],
        )


def _copies(flats: dict[torch.dtype, Tensor]) -> dict[str, Tensor]:
    return {str(dtype): flat.to("cpu", copy=True) for dtype, flat in flats.items()}


def _write(flats: dict[torch.dtype, Tensor], kept: dict[str, Tensor]) -> None:
    for dtype, flat in flats.items():
        flat.copy_(kept[str(dtype)])
