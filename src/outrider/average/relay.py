"""Brings what one rank holds to all others as it is: parameters and buffers, facts, and tensors that mean nothing here.

Does not average, and does not know why one rank's word counts. Called at the start of a run, by hand from `wrap()`,
and where one rank worked alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from outrider.average.arena import Arena
from outrider.average.collective import Collective, RankCollective

LARGE_BYTES = 2**20


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


class Relay:
    """From one rank to all; `device` is where tensors travel: the host, or the arena's device with NCCL.

    Facts travel in `words`, on the host: who waits there for others keeps no device busy.
    """

    def __init__(
        self,
        arena: Arena,
        collective: RankCollective,
        *,
        words: RankCollective,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._arena = arena
        self._collective = collective
        self._words = words
        self._device = device
        self._timeout_s = timeout_s
        # The last one that was relayed: equal on all ranks, and most are the same as the one before.
        self._manifest = b""

    def arena(self, source: int) -> None:
        """Every rank gets the parameters and buffers of one."""
        broadcast_arena(self._arena, self._collective, device=self._device, source=source)

    def facts(self, row: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        """Every rank's row; float64 has room for numbers of bytes and of samples."""
        rows = torch.zeros(self._words.world_size, len(row), dtype=torch.float64)
        rows[self._words.rank] = torch.tensor(row, dtype=torch.float64)
        self._words.sum_([rows])
        return tuple(map(tuple, rows.tolist()))

    def everything(
        self, source: int, *, facts: Sequence[float], manifest: bytes, places: Callable[[bytes], Sequence[Tensor]]
    ) -> Relayed:
        """Parameters, buffers and more of one rank, and the facts of all.

        The source's `manifest` tells the others what more there is; `places` makes the tensors that hold it out of the
        manifest: full ones on the source, and on the others such that are written into.
        """
        *columns, sizes, digests = zip(*self.facts([*facts, len(manifest), _digest(manifest)]), strict=True)
        if (sizes[source], digests[source]) != (len(self._manifest), _digest(self._manifest)):
            self._manifest = self._bytes(manifest, source, size=round(sizes[source]))
        tensors = places(self._manifest)
        self._arena.reclaim()
        self._tensors([*self._arena.flats.values(), *self._arena.integers, *tensors], source)
        return Relayed(facts=tuple(zip(*columns, strict=True)), manifest=self._manifest, tensors=tensors)

    def _bytes(self, own: bytes, source: int, *, size: int) -> bytes:
        is_source = self._collective.rank == source
        travelling = torch.frombuffer(bytearray(own) if is_source else bytearray(size), dtype=torch.uint8)
        travelling = travelling.to(self._device)
        self._collective.broadcast_([travelling], source)
        self._collective.finish(self._timeout_s)
        return travelling.cpu().numpy().tobytes()

    @torch.no_grad()
    def _tensors(self, tensors: Sequence[Tensor], source: int) -> None:
        """As bytes, which every transport takes."""
        is_source = self._collective.rank == source
        for group in _groups(tensors):
            flat = self._filled(group) if is_source else self._empty(group)
            self._collective.broadcast_([flat.view(torch.uint8)], source)
            if not is_source:
                _spread(flat, group)
        self._collective.finish(self._timeout_s)

    def _filled(self, group: Sequence[Tensor]) -> Tensor:
        """Brought together where they are, where that is one place: a copy to another costs most by its number."""
        if len({tensor.device for tensor in group}) > 1:
            group = [tensor.to(self._device) for tensor in group]
        parts = [tensor.reshape(-1) for tensor in group]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self._device)

    def _empty(self, group: Sequence[Tensor]) -> Tensor:
        if len(group) == 1 and group[0].device == self._device and group[0].is_contiguous():
            return group[0].view(-1)
        return torch.empty(sum(map(Tensor.numel, group)), dtype=group[0].dtype, device=self._device)


def _groups(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Small ones of a dtype travel as one, there may be hundreds; a large one by itself, since a copy needs room."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    large = [tensor for tensor in filled if tensor.nbytes >= LARGE_BYTES]
    small = [tensor for tensor in filled if tensor.nbytes < LARGE_BYTES]
    dtypes = dict.fromkeys(tensor.dtype for tensor in small)
    return [[tensor] for tensor in large] + [[one for one in small if one.dtype == dtype] for dtype in dtypes]


def _spread(flat: Tensor, group: Sequence[Tensor]) -> None:
    """What arrived goes where it belongs, and stays where it is there already."""
    if len(group) == 1 and group[0].data_ptr() == flat.data_ptr():
        return
    if len(devices := {tensor.device for tensor in group}) == 1:
        flat = flat.to(devices.pop())
    for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _digest(manifest: bytes) -> int:
    """Small enough for a float64 to hold."""
    return int.from_bytes(blake2b(manifest, digest_size=6).digest())
