"""Sums rounded pieces: every rank receives the packets of all ranks and adds up the values in them.

The sum is computed in float32 and in rank order, so it has the same bits on all ranks. The bytes that a rank receives
grow with the number of ranks. Called by the averagers and by `meet_pieces`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.average.wire_codec import PacketForm


class Broadcasts(Protocol):
    """The part of a collective that PacketSums needs; every collective has it."""

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None: ...


def add_packets(packets: Sequence[Tensor], form: PacketForm, total: Tensor, *, start: int = 0) -> None:
    """Write the sum of the packets' values into `total`: as many values as it holds, from `start` on."""
    if not total.numel():
        return
    values = torch.empty_like(total)
    for rank, packet in enumerate(packets):
        form.decode(packet, total if rank == 0 else values, start=start)
        if rank:
            total.add_(values)


class PacketSums:
    """Sums the packets of all ranks; exchanges them by broadcasts, which every transport has."""

    def __init__(self, collective: Broadcasts, *, rank: int, world_size: int) -> None:
        self._collective = collective
        self._rank = rank
        self._world_size = world_size

    def sum_(self, packet: Tensor, form: PacketForm, total: Tensor) -> None:
        """Write the sum of the values of all ranks into `total`; all ranks call this in the same order."""
        packets = [packet if rank == self._rank else torch.empty_like(packet) for rank in range(self._world_size)]
        for source, one in enumerate(packets):
            self._collective.broadcast_([one], source)
        add_packets(packets, form, total)
