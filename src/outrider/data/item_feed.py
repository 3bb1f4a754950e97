"""Batches of any map-style data set, read in the rank itself.

Decides nothing about samples (the drawer does) and prefetches nothing.
Chosen by make_feed where no workers are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from outrider.core.effects import Batch
from outrider.data.drawer import Collate, Drawer, Request
from outrider.data.transfer import to_device


class ItemFeed:
    """Reads, collates and copies a batch when it is asked for."""

    def __init__(
        self, dataset: Any, *, device: torch.device, seed: int, collate: Collate | None = None, reason: str = ""
    ) -> None:
        self.reason = reason
        self.num_samples = len(dataset)
        self._drawer = Drawer(dataset, seed=seed, collate=collate)
        self._device = device
        self._order: Tensor | None = None
        self._epoch = 0

    def start_epoch(self, order: Tensor, epoch: int) -> None:
        self._order, self._epoch = order, epoch

    def announce(self, batches: Iterable[Batch]) -> None:
        """Nothing runs beside the rank that could use the notice."""

    def fetch(self, batch: Batch) -> Any:
        assert self._order is not None, "fetch before start_epoch"
        return to_device(self._drawer.draw(request_for(batch, order=self._order, epoch=self._epoch)), self._device)

    def close(self) -> None:
        self._order = None


def request_for(batch: Batch, *, order: Tensor, epoch: int) -> Request:
    """The samples at the positions of a batch."""
    assert 0 <= batch.start < batch.stop <= len(order), batch
    return Request(epoch=epoch, indices=tuple(order[batch.start : batch.stop].tolist()))
