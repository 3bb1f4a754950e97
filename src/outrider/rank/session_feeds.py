"""The feeds of a session, one for every data set of the user's loop.

Decides how long to keep a feed: until its data set is used with other settings, or many others were used since. Called
by `SessionRun`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from outrider.data.augmented_feed import AugmentFunction
from outrider.data.feed import Feed, make_feed
from outrider.data.loading import Loading
from outrider.data.sample_reader import Collate
from outrider.data.sample_sequence import SampleSequence

KEPT_FEEDS = 8
"""A loop that makes new data every time, as reinforcement learning does, must not keep all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A data set and how its batches are made."""

    dataset: Any
    batch_size: int
    shuffle: bool = True
    workers: int = 0
    collate: Collate | None = None
    resident: bool | Literal["auto"] = "auto"
    augment: AugmentFunction | None = None
    drop_last: bool = False
    """Drop the end of the order that does not fill a batch."""
    order_seed: int | None = None
    """Seed of the order, if the user's generator decides it; None: the session's seed."""
    sequence: SampleSequence | None = None
    """The user's own order, or batches; None: the data set's, shuffled or not."""
    length: int | None = None
    """Samples per epoch of an iterable data set; None for a map-style one, which has its own length."""
    loading: Loading = field(default_factory=Loading)

    def is_fed_like(self, other: Source) -> bool:
        """Whether both can share one feed; the size and order of batches do not depend on the feed."""
        return self.dataset is other.dataset and self._ways() == other._ways()

    def _ways(self) -> tuple[object, ...]:
        return self.workers, self.collate, self.resident, self.augment, self.loading, self.length


class Feeds:
    """Opens feeds for training and for evaluation; the two never share one, as each has its place in the data."""

    def __init__(self, *, device: torch.device, seed: int) -> None:
        self._device = device
        self._seed = seed
        self._kept: dict[tuple[int, bool], tuple[Source, Feed]] = {}
        """Feeds, the least recently used first. A source keeps its data set alive, so that no other gets its id."""

    def for_training(self, source: Source) -> Feed:
        return self._open(source, (id(source.dataset), True))

    def for_evaluation(self, source: Source) -> Feed:
        return self._open(source, (id(source.dataset), False))

    def close(self) -> None:
        while self._kept:
            self._drop(next(iter(self._kept)))

    def _open(self, source: Source, key: tuple[int, bool]) -> Feed:
        if key in self._kept and not source.is_fed_like(self._kept[key][0]):
            self._drop(key)
        kept = self._kept.pop(key, None) or (source, self._make(source))
        self._kept[key] = kept
        # Count each purpose separately: evaluations inside a loop must not evict that loop's feed.
        same_purpose = [other for other in self._kept if other[1] == key[1]]
        for oldest in same_purpose[:-KEPT_FEEDS]:
            self._drop(oldest)
        return kept[1]

    def _make(self, source: Source) -> Feed:
        return make_feed(
            source.dataset,
            device=self._device,
            seed=self._seed,
            workers=source.workers,
            collate=source.collate,
            resident=source.resident,
            augment=source.augment,
            loading=source.loading,
            length=source.length,
        )

    def _drop(self, key: tuple[int, bool]) -> None:
        self._kept.pop(key)[1].close()
