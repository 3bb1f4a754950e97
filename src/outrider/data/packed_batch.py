"""The interface of feeds, and packed batches: inputs from the host with a function that unpacks them on the device.

Decides nothing. A captured step keeps the inputs at fixed addresses and unpacks inside the CUDA graph; an eager step
unpacks immediately. Created by the feeds, unpacked by the replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from outrider.policy.effects import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """`inputs` are nested containers of tensors; `unpack` turns them into the batch without waiting for the device."""

    inputs: Any
    unpack: Callable[[Any], Any]

    def batch(self) -> Any:
        return self.unpack(self.inputs)


@runtime_checkable
class PackedFeed(Protocol):
    """A feed that can leave part of its work to the unpacking on the device."""

    def packed_batch(self, batch: Batch) -> PackedBatch: ...


class Feed(Protocol):
    """Provides collated batches on the device, by position in the epoch's order."""

    reason: str
    """The reason for the choice of this feed."""

    @property
    def num_samples(self) -> int: ...

    def start_epoch(self, order: Tensor, epoch: int) -> None:
        """Interpret positions in `order` from now on; earlier announcements are dropped."""

    def announce(self, batches: Iterable[Batch]) -> None:
        """Announce the next batches, in this order, so that the feed can read ahead."""

    def fetch(self, batch: Batch) -> Any:
        """Return a batch of at least one sample; a batch that was not announced is read immediately."""

    def close(self) -> None:
        """End worker processes; safe to call twice."""


class Fetcher(Protocol):
    def fetch(self, batch: Batch) -> Any: ...


def packed_batch_of(feed: Fetcher, batch: Batch) -> PackedBatch:
    """The smallest packed form of a batch that this feed can provide."""
    return feed.packed_batch(batch) if isinstance(feed, PackedFeed) else whole(feed.fetch(batch))


def whole(batch: Any) -> PackedBatch:
    """A batch that is unpacked already."""
    return PackedBatch(inputs=batch, unpack=_same)


def as_packed_batch(data: Any) -> PackedBatch:
    """Wrap a plain batch; a packed batch is returned unchanged."""
    return data if isinstance(data, PackedBatch) else whole(data)


def unpacked(data: Any) -> Any:
    """The batch itself, from a packed or a plain batch."""
    return data.batch() if isinstance(data, PackedBatch) else data


def _same(batch: Any) -> Any:
    return batch
