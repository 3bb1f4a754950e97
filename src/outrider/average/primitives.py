"""Averages by hand for the odd cases: gradients, parameters, buffers, and a broadcast, each when the user says so.

Decides how ranks' samples weigh; knows no policy and keeps no state between calls. Called by `wrap()`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.average.arena import Arena
from outrider.average.collective import Collective
from outrider.average.gradients import GradientExchange
from outrider.average.relay import broadcast_arena


class Primitives:
    """The averages of one model; every rank calls the same ones in the same order."""

    def __init__(
        self, arena: Arena, collective: Collective, *, rank: int, world_size: int, device: torch.device
    ) -> None:
        """`device` is where sums happen: the host, or the arena's device with NCCL."""
        self._arena = arena
        self._collective = collective
        self._device = device
        self._gradients = GradientExchange(arena, rank=rank, world_size=world_size, num_facts=0, device=device)

    def average_gradients(self, samples: int) -> int:
        """Every rank gets the mean gradient, weighted by samples; the samples of all ranks."""
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
        """Float buffers; BatchNorm variances become those of the mixture, integer counters the largest."""
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
        """Every rank gets the parameters and buffers of one."""
        broadcast_arena(self._arena, self._collective, device=self._device, source=source)

    def _average(self, tensors: Sequence[Tensor], samples: int) -> None:
        total = torch.tensor([float(samples)], dtype=torch.float64, device=self._device)
        self._collective.sum_([total])
        # Nobody has samples: an even mean is what remains of the wish.
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
