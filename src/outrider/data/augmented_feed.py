"""Batches that are changed at random on the device, after whatever feed brought them there.

Decides the key that each sample gets: it depends on (seed, epoch, sample) alone, so the same sample looks the same
whoever takes it. What is changed is the augmentation's business. Made by make_feed where one is given.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.core.effects import Batch
from outrider.data.drawer import name_samples
from outrider.data.keyed import sample_keys
from outrider.data.parcel import Parcel, parcel_of
from outrider.errors import DataError, OutriderError, named

if TYPE_CHECKING:
    from outrider.data.feed import Feed

AugmentFunction = Callable[[Any, Tensor], Any]
"""Makes a batch of a batch on the device and its keys, one int64 per sample; see `data.keyed` for numbers from keys."""


class AugmentedFeed:
    """Another feed's batches, each passed through the augmentation with its samples' keys."""

    def __init__(self, feed: Feed, augment: AugmentFunction, *, device: torch.device, seed: int) -> None:
        self.reason = f"{feed.reason}; augmented on {device}"
        self._feed = feed
        self._augment = augment
        self._device = device
        self._seed = seed
        self._order: Tensor | None = None
        self._keys: Tensor | None = None

    @property
    def num_samples(self) -> int:
        return self._feed.num_samples

    def start_epoch(self, order: Tensor, epoch: int) -> None:
        self._feed.start_epoch(order, epoch)
        self._order = order
        self._keys = sample_keys(order.to(self._device), seed=self._seed, epoch=epoch)

    def announce(self, batches: Iterable[Batch]) -> None:
        self._feed.announce(batches)

    def fetch(self, batch: Batch) -> Any:
        return self.parcel(batch).batch()

    def parcel(self, batch: Batch) -> Parcel:
        """What the feed below makes of the batch, with the keys of its samples."""
        inner = parcel_of(self._feed, batch)
        assert self._keys is not None, "fetch before start_epoch"
        return Parcel(
            inputs=(inner.inputs, self._keys[batch.start : batch.stop]),
            unpack=lambda inputs: self._augmented(inner.unpack(inputs[0]), inputs[1], batch),
        )

    @torch.no_grad()
    def _augmented(self, data: Any, keys: Tensor, batch: Batch) -> Any:
        try:
            return self._augment(data, keys)
        except OutriderError:
            raise
        except Exception as error:
            raise self._failed(batch, error) from error

    def close(self) -> None:
        self._feed.close()
        self._order = self._keys = None

    def _failed(self, batch: Batch, error: Exception) -> DataError:
        assert self._order is not None
        samples = name_samples(self._order[batch.start : batch.stop].tolist())
        return DataError(
            f"augment failed on {samples}: {named(error)}",
            hint="it is called as augment(batch, keys) with the batch on the device and one int64 key per sample",
            traceback=traceback.format_exc(),
        )
