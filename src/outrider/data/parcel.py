"""A batch that is not unpacked yet: what the host has to bring, and how the batch comes of it on the device.

Decides nothing; a captured step keeps the inputs in fixed places and unpacks inside the graph, an eager one at once.
Made by the feeds, unpacked by the replica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from outrider.core.effects import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """`inputs` is a nest of tensors; `unpack` makes the batch of it without waiting for the device."""

    inputs: Any
    unpack: Callable[[Any], Any]

    def batch(self) -> Any:
        return self.unpack(self.inputs)


@runtime_checkable
class ParcelFeed(Protocol):
    """A feed that can leave part of its work to the device."""

    def parcel(self, batch: Batch) -> Parcel: ...


class Fetcher(Protocol):
    def fetch(self, batch: Batch) -> Any: ...


def parcel_of(feed: Fetcher, batch: Batch) -> Parcel:
    """The smallest parcel that this feed can make of a batch."""
    return feed.parcel(batch) if isinstance(feed, ParcelFeed) else whole(feed.fetch(batch))


def whole(batch: Any) -> Parcel:
    """A batch that is unpacked already."""
    return Parcel(inputs=batch, unpack=_same)


def as_parcel(data: Any) -> Parcel:
    """A parcel as it is, a batch as a whole one."""
    return data if isinstance(data, Parcel) else whole(data)


def unpacked(data: Any) -> Any:
    """The batch itself, whichever form it came in."""
    return data.batch() if isinstance(data, Parcel) else data


def _same(batch: Any) -> Any:
    return batch
