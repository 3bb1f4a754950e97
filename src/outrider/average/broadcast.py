"""Sends the state of one rank to all others: parameters and buffers, facts, and other tensors.

Does not average, and does not decide which rank is the source. Called at the start of a run, by `wrap()`, and after one
rank has trained alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from outrider.average.arena import Arena
from outrider.average.transport.collective import Collective, RankCollective

LARGE_BYTES = 2**20


@torch.no_grad()
def broadcast_arena(arena: Arena, collective: Collective, *, device: torch.device, source: int) -> None:
    """Send the parameters and buffers of one rank to all, through tensors on `device`."""
    arena.reclaim()
    for tensor in [*arena.flats.values(), *arena.integers]:
        travelling = tensor.to(device)
        collective.broadcast_([travelling], source)
        tensor.copy_(travelling)


@torch.no_grad()
def take_mean(tensors: Sequence[Tensor], collective: RankCollective, *, device: torch.device) -> None:
    """Replace each tensor by its mean over ranks with equal weights, integers by their maximum; all ranks call this."""
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            largest = tensor.to(device, torch.int64)
            collective.max_([largest])
            tensor.copy_(largest)
            continue
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        wide = torch.float64 if real.dtype == torch.float64 else torch.float32
        mean = real.to(device, wide, copy=True).contiguous()
        collective.sum_([mean])
        real.copy_(mean.div_(collective.world_size))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedState:
    """The result of a broadcast, the same on all ranks."""

    facts: tuple[tuple[float, ...], ...]
    manifest: bytes
    tensors: Sequence[Tensor]


class StateBroadcast:
    """Broadcasts the state of one rank; tensors are sent from `device`: the host, or the arena's device with NCCL.

    Facts are sent through `words`, a collective on the host, so that no device is busy while ranks wait for each other.
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
        # The last manifest received: equal on all ranks, and usually the same as the next one.
        self._manifest = b""

    def arena(self, source: int) -> None:
        """Send the parameters and buffers of one rank to all."""
        broadcast_arena(self._arena, self._collective, device=self._device, source=source)

    def resting(self, source: int) -> None:
        """Send one rank's tensors that take no part in averages to all; called once, at the start."""
        self.tensors(self._arena.resting, source)

    def facts(self, row: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        """Gather a row of numbers from every rank, as float64, which holds counts of bytes and samples exactly."""
        rows = torch.zeros(self._words.world_size, len(row), dtype=torch.float64)
        rows[self._words.rank] = torch.tensor(row, dtype=torch.float64)
        self._words.sum_([rows])
        return tuple(map(tuple, rows.tolist()))

    def everything(
        self, source: int, *, facts: Sequence[float], manifest: bytes, places: Callable[[bytes], Sequence[Tensor]]
    ) -> ReceivedState:
        """Send parameters, buffers and further tensors of one rank to all, and exchange the facts of all ranks.

        The `manifest` of the source describes the further tensors. `places` turns a manifest into these tensors: the
        values on the source, and the destinations on the other ranks.
        """
        *columns, sizes, digests = zip(*self.facts([*facts, len(manifest), _digest(manifest)]), strict=True)
        if (sizes[source], digests[source]) != (len(self._manifest), _digest(self._manifest)):
            self._manifest = self._bytes(manifest, source, size=round(sizes[source]))
        tensors = places(self._manifest)
        self._arena.reclaim()
        self.tensors([*self._arena.flats.values(), *self._arena.integers, *tensors], source)
        return ReceivedState(facts=tuple(zip(*columns, strict=True)), manifest=self._manifest, tensors=tensors)

    def _bytes(self, own: bytes, source: int, *, size: int) -> bytes:
        is_source = self._collective.rank == source
        travelling = torch.frombuffer(bytearray(own) if is_source else bytearray(size), dtype=torch.uint8)
        travelling = travelling.to(self._device)
        self._collective.broadcast_([travelling], source)
        self._collective.finish(self._timeout_s)
        return travelling.cpu().numpy().tobytes()

    @torch.no_grad()
    def tensors(self, tensors: Sequence[Tensor], source: int) -> None:
        """Send tensors of one rank to all as bytes, which every transport accepts."""
        is_source = self._collective.rank == source
        for group in _groups(tensors):
            flat = self._filled(group) if is_source else self._empty(group)
            self._collective.broadcast_([flat.view(torch.uint8)], source)
            if not is_source:
                _spread(flat, group)
        self._collective.finish(self._timeout_s)

    def _filled(self, group: Sequence[Tensor]) -> Tensor:
        """Concatenate tensors, on their own device if they share one, to reduce copies between devices."""
        if len({tensor.device for tensor in group}) > 1:
            group = [tensor.to(self._device) for tensor in group]
        parts = [tensor.reshape(-1) for tensor in group]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self._device)

    def _empty(self, group: Sequence[Tensor]) -> Tensor:
        if len(group) == 1 and group[0].device == self._device and group[0].is_contiguous():
            return group[0].view(-1)
        return torch.empty(sum(map(Tensor.numel, group)), dtype=group[0].dtype, device=self._device)


def _groups(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group small tensors of a dtype into one message; send a large tensor alone, because grouping needs a copy."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    large = [tensor for tensor in filled if tensor.nbytes >= LARGE_BYTES]
    small = [tensor for tensor in filled if tensor.nbytes < LARGE_BYTES]
    dtypes = dict.fromkeys(tensor.dtype for tensor in small)
    return [[tensor] for tensor in large] + [[one for one in small if one.dtype == dtype] for dtype in dtypes]


def _spread(flat: Tensor, group: Sequence[Tensor]) -> None:
    """Copy the received values to their destinations, unless they are already there."""
    if len(group) == 1 and group[0].data_ptr() == flat.data_ptr():
        return
    if len(devices := {tensor.device for tensor in group}) == 1:
        flat = flat.to(devices.pop())
    for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _digest(manifest: bytes) -> int:
    """A hash that float64 can hold exactly."""
    return int.from_bytes(blake2b(manifest, digest_size=6).digest())
