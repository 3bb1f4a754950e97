"""Reads samples from a map-style data set, collates them into a batch and moves it to a device.

Decides the random seed of each sample from (seed, epoch, index), so a sample looks the same on every rank. Also decides
when a copy may be asynchronous. ItemFeed reads in the rank without prefetching; WorkerFeed reads in its workers.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from outrider.data import randomness
from outrider.data.order import mix, sample_seed
from outrider.errors import DataError, named
from outrider.policy.effects import Batch

Collate = Callable[[list[Any]], Any]

_MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRequest:
    """The samples of one batch."""

    epoch: int
    indices: tuple[int, ...]


class SampleReader:
    """Reads batches; restores the random generators afterwards."""

    def __init__(self, dataset: Any, *, seed: int, collate: Collate | None = None) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate or default_collate
        self._reads_many = callable(getattr(dataset, "__getitems__", None))

    def draw(self, request: ReadRequest) -> Any:
        with randomness.preserved():
            samples = self._read_many(request) if self._reads_many else self._read_each(request)
            return self._collated(samples, request)

    def _read_many(self, request: ReadRequest) -> list[Any]:
        randomness.seed_all(mix(self._seed, request.epoch, *request.indices))
        before = randomness.capture()
        try:
            samples = list(self._dataset.__getitems__(list(request.indices)))
        except Exception as error:
            raise _unreadable(request.indices, error) from error
        if randomness.capture().equals(before):
            return samples
        # If random numbers were drawn for a whole batch, a sample would depend on the other samples in it.
        self._reads_many = False
        return self._read_each(request)

    def _read_each(self, request: ReadRequest) -> list[Any]:
        return [self._read(request.epoch, index) for index in request.indices]

    def _read(self, epoch: int, index: int) -> Any:
        randomness.seed_all(sample_seed(self._seed, epoch, index))
        try:
            return self._dataset[index]
        except Exception as error:
            raise _unreadable([index], error) from error

    def _collated(self, samples: list[Any], request: ReadRequest) -> Any:
        randomness.seed_all(mix(self._seed, request.epoch, *request.indices))
        try:
            return self._collate(samples)
        except Exception as error:
            raise uncollated(request.indices, self._collate, error) from error


def uncollated(numbers: Sequence[int], collate: Collate, error: Exception) -> DataError:
    """The error for samples of which `collate` made no batch; called while `error` is handled."""
    hint = "samples of a batch need equal shapes and types; pass collate= to pad or pack them"
    return DataError(
        f"{name_samples(numbers)} could not be collated: {named(error)}",
        hint=hint if collate is default_collate else None,
        traceback=traceback.format_exc(),
    )


def name_samples(indices: Sequence[int]) -> str:
    """Name samples as `sample 3` or `samples 3, 4, 5`; a long list is shortened."""
    if len(indices) == 1:
        return f"sample {indices[0]}"
    named = ", ".join(str(index) for index in indices[:_MOST_NAMED])
    return f"samples {named}" if len(indices) <= _MOST_NAMED else f"samples {named}, … ({len(indices)} in all)"


def _unreadable(indices: Sequence[int], error: Exception) -> DataError:
    return DataError(
        f"{name_samples(indices)} could not be read: {named(error)}",
        hint=f"try dataset[{indices[0]}] by itself",
        traceback=traceback.format_exc(),
    )


# Only copies to these devices are asynchronous: a copy to the host could be read before it is complete.
_OVERLAPPING = ("cuda", "xpu")


def to_device(batch: Any, device: torch.device | str) -> Any:
    """Move all tensors in nested tuples, lists, dicts and named tuples to `device`; other objects are not changed."""
    return _moved(batch, torch.device(device))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=device.type in _OVERLAPPING)
    if callable(getattr(value, "to", None)):  # packed sequences and tokenizers' batches move themselves
        return value.to(device)
    if isinstance(value, Mapping):
        return _with_values(value, {key: _moved(item, device) for key, item in value.items()})
    if isinstance(value, tuple | list):
        return _with_items(value, [_moved(item, device) for item in value])
    return value


def _with_values(like: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if not isinstance(like, MutableMapping):
        return values
    clone = copy.copy(like)  # a mapping type may carry more than its items
    clone.update(values)
    return clone


def _with_items(like: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    if hasattr(like, "_fields"):
        return type(like)(*items)
    return type(like)(items)


class ItemFeed:
    """Reads, collates and copies each batch on request."""

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device,
        seed: int,
        collate: Collate | None = None,
        reason: str = "",
        pins_memory: bool = False,
    ) -> None:
        self.reason = reason
        self.num_samples = len(dataset)
        self._reader = SampleReader(dataset, seed=seed, collate=collate)
        self._device = device
        self._pins_memory = pins_memory
        self._order: Tensor | None = None
        self._epoch = 0

    def start_epoch(self, order: Tensor, epoch: int) -> None:
        self._order, self._epoch = order, epoch

    def announce(self, batches: Iterable[Batch]) -> None:
        """Does nothing: batches are not read ahead."""

    def fetch(self, batch: Batch) -> Any:
        assert self._order is not None, "fetch before start_epoch"
        drawn = self._reader.draw(request_for(batch, order=self._order, epoch=self._epoch))
        return to_device(pin_memory(drawn) if self._pins_memory else drawn, self._device)

    def close(self) -> None:
        self._order = None


def request_for(batch: Batch, *, order: Tensor, epoch: int) -> ReadRequest:
    """The request for the samples at the positions of a batch."""
    assert 0 <= batch.start < batch.stop <= len(order), batch
    return ReadRequest(epoch=epoch, indices=tuple(order[batch.start : batch.stop].tolist()))
