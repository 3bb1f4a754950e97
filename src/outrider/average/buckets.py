"""Decides which gradients are summed together: stretches of a wire, the last parameters first, as backward makes them.

Knows neither ranks nor sums. Called by GradientExchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.average.layout import Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A stretch of a wire."""

    wire: Tensor
    """What is summed; the last bucket of all has room for the facts too."""
    summed: Tensor
    """The gradients in it."""
    staged: Tensor
    """The same on the parameters' device; the same memory, unless wires are somewhere else."""
    members: tuple[int, ...]
    """Whose gradients, as places among the parameters that take part."""

    @property
    def is_bridged(self) -> bool:
        return self.staged.device != self.summed.device

    def send(self) -> None:
        if self.is_bridged:
            self.summed.copy_(self.staged, non_blocking=self.staged.is_cuda)


def cut(places: Sequence[Place], members: Sequence[int], *, max_bytes: int) -> list[tuple[int, tuple[int, ...]]]:
    """Where each bucket of one flat tensor starts and who is in it, from the end of the tensor to its start.

    A bucket is closed once it holds `max_bytes`; the rest, with the first parameters, is the last one.
    """
    buckets: list[tuple[int, tuple[int, ...]]] = []
    waiting: list[int] = []
    num_bytes = 0
    for member in reversed(members):
        place = places[member]
        waiting.append(member)
        num_bytes += place.numel * place.dtype.itemsize
        if num_bytes >= max_bytes and place.offset > 0:
            buckets.append((place.offset, tuple(waiting)))
            waiting, num_bytes = [], 0
    return [*buckets, (0, tuple(waiting))]
