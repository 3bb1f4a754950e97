"""Data sets made of tensors, seen as a table: columns with one row per sample.

Decides which data sets are tables and what a batch of rows looks like. Does not decide where the columns are kept.
Called by make_feed; TensorFeed takes rows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from outrider.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Table:
    """Columns of equal length; a map-style data set itself."""

    columns: tuple[Tensor, ...]
    build: Callable[[Sequence[Tensor]], Any]
    """Makes a sample or a batch of what was taken from the columns."""
    rows: Tensor | None = None
    """The rows that count, for a subset; None for all."""

    def __len__(self) -> int:
        return len(self.columns[0]) if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = index if self.rows is None else int(self.rows[index])
        return self.build([column[row] for column in self.columns])

    @property
    def num_bytes(self) -> int:
        """Memory of the rows that count."""
        return sum(column[:1].numel() * column.element_size() for column in self.columns) * len(self)

    def resolve(self, order: Tensor) -> Tensor:
        """Row numbers in the columns of the samples in `order`."""
        return order if self.rows is None else self.rows[order]

    def on(self, device: torch.device) -> Table:
        """A copy on the device of nothing but the rows that count."""
        columns = self.columns
        if self.rows is not None:
            columns = tuple(column.index_select(0, self.rows.to(column.device)) for column in columns)
        return Table(columns=tuple(column.to(device) for column in columns), build=self.build)


def as_table(dataset: Any) -> Table | None:
    """The data set as a table, or None where it is not made of tensors alone."""
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


def _subset(subset: Subset[Any]) -> Table | None:
    table = as_table(subset.dataset) if _reads_like(subset, Subset) else None
    if table is None:
        return None
    indices = torch.as_tensor(subset.indices, dtype=torch.int64)
    if not bool(((indices >= 0) & (indices < len(table))).all()):
        return None  # read sample by sample, where a wrong index gets an error that names it
    return Table(columns=table.columns, build=table.build, rows=table.resolve(indices))


def _table(
    columns: Sequence[Tensor], build: Callable[[Sequence[Tensor]], Any], names: Sequence[Any] | None = None
) -> Table:
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        listed = ", ".join(
            f"{name}: {length}" for name, length in zip(names or range(len(columns)), lengths, strict=True)
        )
        raise DataError(
            f"the tensors of a data set must have the same first dimension, got {listed}",
            hint="the first dimension counts the samples; check for a transposed or truncated tensor",
        )
    return Table(columns=tuple(columns), build=build)


def _are_tensors(values: Sequence[Any]) -> bool:
    return len(values) > 0 and all(isinstance(value, Tensor) and value.ndim > 0 for value in values)


def _look_like_columns(tensors: Sequence[Tensor]) -> bool:
    # A list of tensors that all look alike is a list of samples, as a DataLoader would read it.
    kinds = {(tensor.dtype, tensor.shape[1:]) for tensor in tensors}
    return len({len(tensor) for tensor in tensors}) == 1 and len(kinds) > 1


def _reads_like(dataset: Any, base: type) -> bool:
    """Whether a subclass left the reading of samples as it was."""
    kind = type(dataset)
    own = getattr(kind, "__getitem__", None) is getattr(base, "__getitem__", None)
    return own and getattr(kind, "__getitems__", None) is getattr(base, "__getitems__", None)


def _only(columns: Sequence[Tensor]) -> Tensor:
    return columns[0]


def _named(columns: Sequence[Tensor], *, keys: tuple[Any, ...]) -> dict[Any, Tensor]:
    return dict(zip(keys, columns, strict=True))


def _like(columns: Sequence[Tensor], *, kind: type[Any]) -> Any:
    return kind(*columns) if hasattr(kind, "_fields") else tuple(columns)
