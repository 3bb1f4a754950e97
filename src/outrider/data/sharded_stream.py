"""A stream of shards of known sizes; a rank opens only the shards that contain its samples.

Decides the order of shards in an epoch, and which shard contains sample number n. `StreamFeed` skips the samples of
other ranks with `skip()`, which passes over whole shards without opening them. Users create one and pass it as their
data set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from outrider.data.order import in_order, shuffled
from outrider.errors import ConfigError, DataError


class ShardedStream(IterableDataset[Any]):
    """Yields the samples of `read(shard)` for each shard in turn; `sizes` has the number of samples in each shard.

    With `shuffle` the shards come in a new order in each epoch, the same on all ranks. `read` must return the same
    samples each time and must not draw random numbers, because skipped shards are not read.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        *,
        sizes: Sequence[int],
        read: Callable[[Any], Iterable[Any]],
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if len(shards) != len(sizes) or not len(shards):
            raise ConfigError(
                f"{len(shards)} shards were given, and {len(sizes)} sizes",
                hint="pass the size of every shard, in order",
            )
        if min(sizes) < 0 or not sum(sizes):
            raise ConfigError(
                f"sizes must be numbers of samples, got {list(sizes)}", hint="count the samples of every shard once"
            )
        self._shards, self._sizes, self._read = shards, sizes, read
        self._shuffle, self._seed = shuffle, seed
        self._epoch = 0

    def __len__(self) -> int:
        return sum(self._sizes)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> ShardIterator:
        count = len(self._shards)
        order = shuffled(count, seed=self._seed, epoch=self._epoch) if self._shuffle else in_order(count)
        return ShardIterator([(self._shards[number], self._sizes[number]) for number in order.tolist()], self._read)


class ShardIterator(Iterator[Any]):
    """Iterates over samples; opens a shard when a sample of it is first read."""

    def __init__(self, shards: Sequence[tuple[Any, int]], read: Callable[[Any], Iterable[Any]]) -> None:
        self._waiting = iter(shards)
        self._read = read
        self._shard: Any = None
        self._size = self._taken = 0
        self._items: Iterator[Any] | None = None

    def __next__(self) -> Any:
        self._enter()
        if self._items is None:
            # Skip the samples that were passed over before the shard was opened.
            self._items = islice(iter(self._read(self._shard)), self._taken, None)
        try:
            item = next(self._items)
        except StopIteration:
            raise DataError(
                f"{self._shard} ended before sample {self._taken}, its size was given as {self._size}",
                hint="count the samples of every shard, and pass sizes= in the order of the shards",
            ) from None
        self._taken += 1
        return item

    def skip(self, count: int) -> None:
        """Pass over samples, at most up to the end; shards that are skipped completely are not read."""
        while count:
            try:
                self._enter()
            except StopIteration:
                return
            here = min(count, self._size - self._taken)
            if self._items is not None and here < self._size - self._taken:
                next(islice(self._items, here - 1, here), None)
            self._taken += here
            count -= here

    def _enter(self) -> None:
        """If the current shard has no more samples, go to the next shard that has some."""
        while self._taken >= self._size:
            self._shard, self._size = next(self._waiting)
            self._taken, self._items = 0, None
