"""Applies a random augmentation on the device to the batches of another feed.

Decides the key of each sample: it depends on (seed, epoch, sample) only, so a sample looks the same on every rank.
The user's function decides how samples change. Created by make_feed if an augmentation is given.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from outrider.data.keyed import sample_keys
from outrider.data.packed_batch import Feed, PackedBatch, packed_batch_of
from outrider.data.sample_reader import name_samples
from outrider.errors import DataError, OutriderError, named
from outrider.policy.effects import Batch

AugmentFunction = Callable[[Any, Tensor], Any]
"""Changes a batch on the device, given one int64 key per sample; `data.keyed` draws random numbers from keys."""


class AugmentedFeed:
    """Passes the batches of another feed through the augmentation, with the keys of their samples."""

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

    @property
    def plain(self) -> Feed:
        """The feed without the augmentation."""
        return self._feed

    def start_epoch(self, order: Tensor, epoch: int) -> None:
        self._feed.start_epoch(order, epoch)
        self._order = order
        self._keys = sample_keys(order.to(self._device), seed=self._seed, epoch=epoch)

    def announce(self, batches: Iterable[Batch]) -> None:
        self._feed.announce(batches)

    def fetch(self, batch: Batch) -> Any:
        return self.packed_batch(batch).batch()

    def packed_batch(self, batch: Batch) -> PackedBatch:
        """The packed batch of the underlying feed, with the keys of its samples."""
        inner = packed_batch_of(self._feed, batch)
        assert self._keys is not None, "fetch before start_epoch"
        return PackedBatch(
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
