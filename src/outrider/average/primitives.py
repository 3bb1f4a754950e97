"""Manual averages of gradients, parameters and buffers, and a broadcast, each when the user calls it.

Decides the weights of the ranks; knows no policy and keeps no state between calls. Called by `wrap()`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.average.arena import Arena
from outrider.average.broadcast import broadcast_arena
from outrider.average.gradients import GradientExchange
from outrider.average.transport.collective import Collective


class Primitives:
    """The averages of one model; every rank must call the same averages in the same order."""

    def __init__(
        self, arena: Arena, collective: Collective, *, rank: int, world_size: int, device: torch.device
    ) -> None:
        """`device` is the device of sums: the host, or the arena's device with NCCL."""
        self._arena = arena
        self._collective = collective
        self._device = device
        self._gradients = GradientExchange(arena, rank=rank, world_size=world_size, num_facts=0, device=device)

    def average_gradients(self, samples: int) -> int:
        """Average gradients, weighted by samples; returns the samples of all ranks."""
        self._gradients.pack(samples, [])
        self._collective.sum_(self._gradients.wires)
        return self._gradients.settle().total_samples

    @torch.no_grad()
    def average_parameters(self, samples: int) -> None:
        self._arena.reclaim()
        self._average(
            [flat[: self._arena.parameter_numel[dtype]] for dtype, flat in self._arena.flats.items()], samples
        )

    @torch.no_grad()
    def average_buffers(self, samples: int) -> None:
        """Average float buffers; BatchNorm variances become those of the mixture, integer counters the maximum."""
        arena = self._arena
        arena.reclaim()
        for pair in arena.norm_blocks:
            flat = arena.flats[pair.dtype]
            flat[pair.variance] += flat[pair.mean].square()
        self._average([flat[arena.parameter_numel[dtype] :] for dtype, flat in arena.flats.items()], samples)
        for pair in arena.norm_blocks:
            flat = arena.flats[pair.dtype]
            flat[pair.variance] -= flat[pair.mean].square()
            flat[pair.variance].clamp_(min=0.0)
        self._take_largest(arena.integers)

    def broadcast(self, source: int) -> None:
        """Send the parameters and buffers of one rank to all."""
        broadcast_arena(self._arena, self._collective, device=self._device, source=source)

    def _average(self, tensors: Sequence[Tensor], samples: int) -> None:
        total = torch.tensor([float(samples)], dtype=torch.float64, device=self._device)
        self._collective.sum_([total])
        # No rank has samples: use equal weights.
        if not total.item():
            self._average(tensors, 1)
            return
        for tensor in (tensor for tensor in tensors if tensor.numel()):
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            travelling = tensor.to(self._device, wide) * (samples / total.to(wide))
            self._collective.sum_([travelling])
            tensor.copy_(travelling)

    def _take_largest(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            travelling = tensor.to(self._device, torch.int64)
            self._collective.max_([travelling])
            tensor.copy_(travelling)
