"""Brings what one rank holds to all others as it is: parameters and buffers, facts, and bytes that mean nothing here.

Does not average, and does not know why one rank's word counts. Called at the start of a run, by hand from `wrap()`,
and where one rank worked alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
    cargo: bytes
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

    def everything(self, source: int, *, facts: Sequence[float], cargo: bytes) -> Relayed:
        """Parameters, buffers and cargo of one rank, and the facts of all; whose cargo does not count passes none."""
        *rows, sizes = zip(*self._gathered([*facts, float(len(cargo))]), strict=True)
        started_s = time.perf_counter()
        self.arena(source)
        own = bytearray(cargo) if self._collective.rank == source else bytearray(round(sizes[source]))
        travelling = torch.frombuffer(own, dtype=torch.uint8).to(self._device)
        self._collective.broadcast_([travelling], source)
        self._collective.finish(self._timeout_s)
        received = travelling.cpu().numpy().tobytes()
        ms = (time.perf_counter() - started_s) * 1e3
        return Relayed(facts=tuple(zip(*rows, strict=True)), cargo=received, ms=ms)

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
