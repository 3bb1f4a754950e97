"""Batches of an iterable data set: every rank counts the items and uses those at its own positions.

Decides how the items of a stream get positions: item number n of an epoch has position n, on every rank. So each rank
reads the whole stream and skips the items of other ranks; all ranks must get the same items in the same order.
"""

from __future__ import annotations

import hashlib
import traceback
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset, default_collate

from outrider.data import randomness
from outrider.data.order import mix
from outrider.data.sample_reader import Collate, to_device, uncollated
from outrider.data.sharded_stream import ShardIterator
from outrider.errors import ConfigError, DataError, OutriderError, named
from outrider.policy.effects import Batch

KEPT_ITEMS = 128
"""Items that stay in memory after they were read, because the policy may ask for a few of them later."""

NO_SPLITTER = "pass nodesplitter=None to WebDataset: outrider hands out the samples, each to one of the ranks"


def is_stream(dataset: Any) -> bool:
    """Whether samples can be read only in sequence."""
    # torch's IterableDataset inherits a __getitem__ that only raises.
    return isinstance(dataset, IterableDataset | Iterator) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__") and not isinstance(dataset, type)
    )


def refuse_iterators(stream: Any) -> None:
    """Raise for an iterator, which could be read for one epoch only."""
    if isinstance(stream, Iterator):
        raise DataError(
            f"{type(stream).__name__} can be read only once, and every epoch reads it anew",
            hint="pass an object whose __iter__ starts from the beginning, such as an IterableDataset",
        )


def stream_length(stream: Any, length: int | None) -> int:
    """The number of items in an epoch: the given length, or the stream's own."""
    refuse_iterators(stream)
    name = type(stream).__name__
    if length is not None:
        return length
    try:
        return len(stream)
    except TypeError:
        raise DataError(
            f"{name} is an iterable data set without a length, so nobody knows when an epoch ends",
            hint="pass length=, the number of its samples in an epoch, such as length=10_000",
        ) from None


def refuse_for_stream(stream: Any, *, shuffle: bool | None, order: Any, workers: int | None) -> None:
    """Raise for settings that a stream cannot honour."""
    name = type(stream).__name__
    if shuffle:
        raise ConfigError(
            f"shuffle=True, but {name} is an iterable data set, which has an order of its own",
            hint="leave shuffle out, and shuffle inside the data set",
        )
    if order is not None:
        raise ConfigError(
            f"order was given, but {name} is an iterable data set, whose samples have no index",
            hint="leave order out, or use a map-style data set with __getitem__ and __len__",
        )
    if workers:
        raise ConfigError(
            f"{workers} workers were asked for, but {name} is an iterable data set: each worker would read all of it",
            hint="pass workers=0 (num_workers=0 in a DataLoader); the rank itself reads the stream",
        )


class StreamFeed:
    """Reads a stream in the rank, in the order of its items."""

    def __init__(
        self, stream: Any, *, length: int, device: torch.device, seed: int, collate: Collate | None = None
    ) -> None:
        self.reason = f"{type(stream).__name__} is a stream of {length} samples, read in the rank"
        self.num_samples = length
        self._stream = stream
        self._device = device
        self._seed = seed
        self._collate = collate or default_collate
        self._order: Tensor | None = None
        self._epoch: int | None = None
        self._items: Iterator[Any] | None = None
        self._next = 0
        """The number of the item that the iterator yields next."""
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._states: randomness.RandomStates | None = None

    def start_epoch(self, order: Tensor, epoch: int) -> None:
        # Do not restart the same epoch: evaluations read it again, and after a segment that ended early it continues.
        if epoch != self._epoch:
            self._items, self._epoch = None, epoch
        self._order = order

    def announce(self, batches: Iterable[Batch]) -> None:
        """Does nothing: a stream is not read ahead."""

    def fetch(self, batch: Batch) -> Any:
        assert self._order is not None, "fetch before start_epoch"
        numbers = self._order[batch.start : batch.stop].tolist()
        # Random numbers of the stream depend on seed and epoch only: all ranks must get the same items.
        with randomness.preserved():
            if self._states is not None:
                randomness.restore(self._states)
            samples = [self._item(number) for number in numbers]
            self._states = randomness.capture()
            collated = self._collated(samples, numbers)
        return to_device(collated, self._device)

    def first_sample(self) -> str:
        """A digest of the first item of the epoch; it differs between ranks if the stream was split by rank."""
        with randomness.preserved():
            self._begin()
            item = self._item(0)
            self._states = randomness.capture()
        digest = hashlib.blake2b(digest_size=6)
        for leaf in tree_leaves(item):
            digest.update(_bytes_of(leaf))
        return digest.hexdigest()

    def close(self) -> None:
        self._items = self._order = None
        self._kept.clear()

    def _item(self, number: int) -> Any:
        if self._items is None or (number < self._next and number not in self._kept):
            self._begin()
        self._skip(number - KEPT_ITEMS + 1 - self._next)
        while number >= self._next:
            self._kept[self._next] = self._read()
            self._next += 1
            if len(self._kept) > KEPT_ITEMS:
                self._kept.popitem(last=False)
        return self._kept[number]

    def _skip(self, count: int) -> None:
        """Pass over samples of other ranks without keeping them; the caller reads the last ones before its sample."""
        if count <= 0:
            return
        if isinstance(self._items, ShardIterator):
            self._items.skip(count)
            self._next += count
            return
        for _ in range(count):
            self._read()
            self._next += 1

    def _begin(self) -> None:
        assert self._epoch is not None
        randomness.seed_all(mix(self._seed, self._epoch))
        if callable(getattr(self._stream, "set_epoch", None)):
            self._stream.set_epoch(self._epoch)
        self._kept.clear()
        self._items, self._next = iter(self._stream), 0

    def _read(self) -> Any:
        assert self._items is not None
        try:
            return next(self._items)
        except StopIteration:
            raise DataError(
                f"{type(self._stream).__name__} ended after {self._next} samples, {self.num_samples} were expected",
                hint=f"pass length={self._next}",
            ) from None
        except OutriderError:
            raise
        except Exception as error:
            raise DataError(
                f"sample {self._next} of the stream could not be read: {named(error)}",
                hint=NO_SPLITTER if "nodesplitter" in str(error) else "iterate over the data set by itself",
                traceback=traceback.format_exc(),
            ) from error

    def _collated(self, samples: list[Any], numbers: list[int]) -> Any:
        try:
            return self._collate(samples)
        except Exception as error:
            raise uncollated(numbers, self._collate, error) from error


def _bytes_of(leaf: Any) -> bytes:
    """Bytes that can be compared between processes: of tensors, arrays, text and numbers; empty for other objects."""
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray):
        return leaf.tobytes()
    return repr(leaf).encode() if isinstance(leaf, str | bytes | int | float) else b""
