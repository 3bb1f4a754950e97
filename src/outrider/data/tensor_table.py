"""Data sets of tensors as tables, whose columns have one row per sample, and the feed that takes rows by index.

Decides which data sets are tables, how rows become a batch, and how rows reach the device: indexed there, or indexed on
the host and copied asynchronously. make_feed decides whether the tensors fit on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from outrider.data.packed_batch import PackedBatch, whole
from outrider.errors import DataError
from outrider.policy.effects import Batch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorTable:
    """Columns of equal length; itself a map-style data set."""

    columns: tuple[Tensor, ...]
    build: Callable[[Sequence[Tensor]], Any]
    """Makes a sample or a batch from rows of the columns."""
    rows: Tensor | None = None
    """The rows of a subset; None for all rows."""

    def __len__(self) -> int:
        return len(self.columns[0]) if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = index if self.rows is None else int(self.rows[index])
        return self.build([column[row] for column in self.columns])

    @property
    def num_bytes(self) -> int:
        """Memory of the used rows."""
        return sum(column[:1].numel() * column.element_size() for column in self.columns) * len(self)

    def resolve(self, order: Tensor) -> Tensor:
        """The rows, in the columns, of the samples in `order`."""
        return order if self.rows is None else self.rows[order]

    def on(self, device: torch.device) -> TensorTable:
        """A copy of the used rows on the device."""
        columns = self.columns
        if self.rows is not None:
            columns = tuple(column.index_select(0, self.rows.to(column.device)) for column in columns)
        return TensorTable(columns=tuple(column.to(device) for column in columns), build=self.build)


def as_table(dataset: Any) -> TensorTable | None:
    """The data set as a table, or None if it does not consist of tensors only."""
    if isinstance(dataset, Subset):
        return _subset(dataset)
    if isinstance(dataset, TensorDataset):
        return _table(dataset.tensors, tuple) if dataset.tensors and _reads_like(dataset, TensorDataset) else None
    if isinstance(dataset, Tensor):
        return _table([dataset], _only) if dataset.ndim > 0 else None
    if isinstance(dataset, Mapping) and _are_tensors(list(dataset.values())):
        return _table(list(dataset.values()), partial(_named, keys=tuple(dataset)), names=list(dataset))
    if isinstance(dataset, tuple) and _are_tensors(dataset):
        return _table(dataset, partial(_like, kind=type(dataset)))
    if isinstance(dataset, list) and _are_tensors(dataset) and _look_like_columns(dataset):
        return _table(dataset, list)
    return None


def _subset(subset: Subset[Any]) -> TensorTable | None:
    table = as_table(subset.dataset) if _reads_like(subset, Subset) else None
    if table is None:
        return None
    indices = torch.as_tensor(subset.indices, dtype=torch.int64)
    if not bool(((indices >= 0) & (indices < len(table))).all()):
        return None  # read sample by sample, where a wrong index gets an error that names it
    return TensorTable(columns=table.columns, build=table.build, rows=table.resolve(indices))


def _table(
    columns: Sequence[Tensor], build: Callable[[Sequence[Tensor]], Any], names: Sequence[Any] | None = None
) -> TensorTable:
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        listed = ", ".join(
            f"{name}: {length}" for name, length in zip(names or range(len(columns)), lengths, strict=True)
        )
        raise DataError(
            f"the tensors of a data set must have the same first dimension, got {listed}",
            hint="the first dimension counts the samples; check for a transposed or truncated tensor",
        )
    return TensorTable(columns=tuple(columns), build=build)


def _are_tensors(values: Sequence[Any]) -> bool:
    return len(values) > 0 and all(isinstance(value, Tensor) and value.ndim > 0 for value in values)


def _look_like_columns(tensors: Sequence[Tensor]) -> bool:
    # A list of tensors with equal shapes is a list of samples, as for a DataLoader.
    kinds = {(tensor.dtype, tensor.shape[1:]) for tensor in tensors}
    return len({len(tensor) for tensor in tensors}) == 1 and len(kinds) > 1


def _reads_like(dataset: Any, base: type) -> bool:
    """Whether the data set reads samples like `base`, without overriding it."""
    kind = type(dataset)
    own = getattr(kind, "__getitem__", None) is getattr(base, "__getitem__", None)
    return own and getattr(kind, "__getitems__", None) is getattr(base, "__getitems__", None)


def _only(columns: Sequence[Tensor]) -> Tensor:
    return columns[0]


def _named(columns: Sequence[Tensor], *, keys: tuple[Any, ...]) -> dict[Any, Tensor]:
    return dict(zip(keys, columns, strict=True))


def _like(columns: Sequence[Tensor], *, kind: type[Any]) -> Any:
    return kind(*columns) if hasattr(kind, "_fields") else tuple(columns)


class TensorFeed:
    """Rows of a table by position; created by `resident_feed` and `host_feed`."""

    def __init__(self, table: TensorTable, *, device: torch.device, reason: str) -> None:
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
        """Does nothing: indexing rows is cheaper than preparing them."""

    def fetch(self, batch: Batch) -> Any:
        return self._gather(self._rows_of(batch))

    def packed_batch(self, batch: Batch) -> PackedBatch:
        """For resident tensors, pack only the row numbers; rows are indexed when the batch is unpacked."""
        if self._home != self._device:
            return whole(self.fetch(batch))
        return PackedBatch(inputs=self._rows_of(batch), unpack=self._gather)

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
            # Pinned memory lets the copy overlap; the allocator keeps the block until the copy is complete.
            taken = torch.empty((len(rows), *column.shape[1:]), dtype=column.dtype, pin_memory=True)
            torch.index_select(column, 0, rows, out=taken)
            return taken.to(self._device, non_blocking=True)
        return column.index_select(0, rows).to(self._device)


def resident_feed(table: TensorTable, *, device: torch.device, reason: str) -> TensorFeed:
    """A feed that indexes rows on the device."""
    return TensorFeed(table.on(device), device=device, reason=reason)


def host_feed(table: TensorTable, *, device: torch.device, reason: str) -> TensorFeed:
    """A feed that indexes rows in host memory and copies them to the device."""
    columns = tuple(column.detach().cpu() for column in table.columns)
    return TensorFeed(TensorTable(columns=columns, build=table.build, rows=table.rows), device=device, reason=reason)
