"""Batches of a data set made of tensors: rows taken by index, with no Python per sample.

Decides how rows reach the device: taken there, or taken on the host and copied behind its back.
Whether the tensors fit on the device is decided by make_feed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from outrider.core.effects import Batch
from outrider.data.parcel import Parcel, whole
from outrider.data.table import Table


class TensorFeed:
    """Rows of a table by position; `resident_feed` and `host_feed` make one."""

    def __init__(self, table: Table, *, device: torch.device, reason: str) -> None:
        self.reason = reason
        self._table = table
        self._device = device
        self._home = table.columns[0].device
        self._rows: Tensor | None = None

    @property
    def num_samples(self) -> int:
        return len(self._table)

    def start_epoch(self, order: Tensor, epoch: int) -> None:
        self._rows = self._table.resolve(order).to(self._home)

    def announce(self, batches: Iterable[Batch]) -> None:
        """Nothing to prepare: taking rows costs less than handing them over."""

    def fetch(self, batch: Batch) -> Any:
        return self._gather(self._rows_of(batch))

    def parcel(self, batch: Batch) -> Parcel:
        """Of resident tensors only the row numbers; they are taken wherever the parcel is unpacked."""
        if self._home != self._device:
            return whole(self.fetch(batch))
        return Parcel(inputs=self._rows_of(batch), unpack=self._gather)

    def close(self) -> None:
        self._rows = None

    def _rows_of(self, batch: Batch) -> Tensor:
        assert self._rows is not None, "fetch before start_epoch"
        assert 0 <= batch.start < batch.stop <= len(self._rows), batch
        return self._rows[batch.start : batch.stop]

    def _gather(self, rows: Tensor) -> Any:
        return self._table.build([self._take(column, rows) for column in self._table.columns])

    def _take(self, column: Tensor, rows: Tensor) -> Tensor:
        if self._home.type == "cpu" and self._device.type == "cuda":
            # Page-locked memory lets the copy overlap; the allocator keeps the block until the copy is done.
            taken = torch.empty((len(rows), *column.shape[1:]), dtype=column.dtype, pin_memory=True)
            torch.index_select(column, 0, rows, out=taken)
            return taken.to(self._device, non_blocking=True)
        return column.index_select(0, rows).to(self._device)


def resident_feed(table: Table, *, device: torch.device, reason: str) -> TensorFeed:
    """Rows taken on the device itself."""
    return TensorFeed(table.on(device), device=device, reason=reason)


def host_feed(table: Table, *, device: torch.device, reason: str) -> TensorFeed:
    """Rows taken in host memory and copied to the device."""
    columns = tuple(column.detach().cpu() for column in table.columns)
    return TensorFeed(Table(columns=columns, build=table.build, rows=table.rows), device=device, reason=reason)
