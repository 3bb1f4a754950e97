"""Brings what one rank holds to all others as it is: parameters and buffers, facts, and tensors that mean nothing here.

Does not average, and does not know why one rank's word counts. Called at the start of a run, by hand from `wrap()`,
and where one rank worked alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.average.arena import Arena
from outrider.average.collective import Collective, RankCollective


@torch.no_grad()
def broadcast_arena(arena: Arena, collective: Collective, *, device: torch.device, source: int) -> None:
    """Every rank gets the parameters and buffers of one; they travel on `device`."""
    arena.reclaim()
    for tensor in [*arena.flats.values(), *arena.integers]:
        travelling = tensor.to(device)
        collective.broadcast_([travelling], source)
        tensor.copy_(travelling)


@dataclass(frozen=True, kw_only=True, slots=True)
class Relayed:
    """What every rank has afterwards."""

    facts: tuple[tuple[float, ...], ...]
    manifest: bytes
    tensors: Sequence[Tensor]
    ms: float
    """What it took once all ranks were there."""


class Relay:
    """From one rank to all; `device` is where tensors travel: the host, or the arena's device with NCCL."""

    def __init__(self, arena: Arena, collective: RankCollective, *, device: torch.device, timeout_s: float) -> None:
        self._arena = arena
        self._collective = collective
        self._device = device
        self._timeout_s = timeout_s

    def arena(self, source: int) -> None:
        """Every rank gets the parameters and buffers of one."""
        broadcast_arena(self._arena, self._collective, device=self._device, source=source)

    def everything(
        self, source: int, *, facts: Sequence[float], manifest: bytes, places: Callable[[bytes], Sequence[Tensor]]
    ) -> Relayed:
        """Parameters, buffers and more of one rank, and the facts of all.

        The source's `manifest` tells the others what more there is; `places` makes the tensors that hold it out of the
        manifest: full ones on the source, and on the others such that are written into.
        """
        *rows, sizes = zip(*self._gathered([*facts, float(len(manifest))]), strict=True)
        started_s = time.perf_counter()
        self.arena(source)
        manifest = self._bytes(manifest, source, size=round(sizes[source]))
        tensors = places(manifest)
        self._tensors(tensors, source)
        ms = (time.perf_counter() - started_s) * 1e3
        return Relayed(facts=tuple(zip(*rows, strict=True)), manifest=manifest, tensors=tensors, ms=ms)

    def _bytes(self, own: bytes, source: int, *, size: int) -> bytes:
        is_source = self._collective.rank == source
        travelling = torch.frombuffer(bytearray(own) if is_source else bytearray(size), dtype=torch.uint8)
        travelling = travelling.to(self._device)
        self._collective.broadcast_([travelling], source)
        self._collective.finish(self._timeout_s)
        return travelling.cpu().numpy().tobytes()

    @torch.no_grad()
    def _tensors(self, tensors: Sequence[Tensor], source: int) -> None:
        """All of one dtype travel as one, since there may be hundreds; as bytes, which every transport takes."""
        is_source = self._collective.rank == source
        filled = [tensor for tensor in tensors if tensor.numel()]
        dtypes = dict.fromkeys(tensor.dtype for tensor in filled)
        groups = [[tensor for tensor in filled if tensor.dtype == dtype] for dtype in dtypes]
        flats = [self._flat(group, is_full=is_source) for group in groups]
        self._collective.broadcast_([flat.view(torch.uint8) for flat in flats], source)
        self._collective.finish(self._timeout_s)
        if is_source:
            return
        for group, flat in zip(groups, flats, strict=True):
            for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _flat(self, group: Sequence[Tensor], *, is_full: bool) -> Tensor:
        if is_full:
            return torch.cat([tensor.reshape(-1).to(self._device) for tensor in group])
        num_elements = sum(tensor.numel() for tensor in group)
        return torch.empty(num_elements, dtype=group[0].dtype, device=self._device)

    def _gathered(self, row: Sequence[float]) -> list[list[float]]:
        """Every rank's row; float64 has room for numbers of bytes and of samples."""
        rows = torch.zeros(self._collective.world_size, len(row), dtype=torch.float64)
        rows[self._collective.rank] = torch.tensor(row, dtype=torch.float64)
        rows = rows.to(self._device)
        self._collective.sum_([rows])
        # A lost peer must not make the host wait forever.
        self._collective.finish(self._timeout_s)
        told: list[list[float]] = rows.tolist()
        return told
