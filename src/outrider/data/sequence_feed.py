"""Batches by position in a sequence drawn by the user's sampler; the data set's own feed reads the samples.

Decides which samples belong to a range of positions: each position is one sample, or one whole batch. Created for one
epoch of `train()`, one pass of a session, or one evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from outrider.data.packed_batch import Feed, PackedBatch, packed_batch_of
from outrider.data.sample_sequence import DrawnSequence
from outrider.policy.effects import Batch


class SequenceFeed:
    """A feed over the positions of a drawn sequence; the feed of the data set outlives it."""

    def __init__(self, feed: Feed, drawn: DrawnSequence) -> None:
        self.reason = feed.reason
        self.num_samples = drawn.num_positions
        self._feed = feed
        self._drawn = drawn
        self._ends: Tensor | None = None

    def start_epoch(self, order: Tensor, epoch: int) -> None:
        """`order` lists positions of the sequence; they are in order unless a segment ended early."""
        drawn = self._drawn
        if drawn.ends is None:
            self._feed.start_epoch(drawn.indices[order], epoch)
            return
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), drawn.ends[:-1]])
        sizes = (drawn.ends - starts)[order]
        self._ends = sizes.cumsum(0)
        # Concatenate the batches in the order of the positions.
        within = torch.arange(int(sizes.sum())) - (self._ends - sizes).repeat_interleave(sizes)
        self._feed.start_epoch(drawn.indices[starts[order].repeat_interleave(sizes) + within], epoch)

    def announce(self, batches: Iterable[Batch]) -> None:
        self._feed.announce([self._samples(batch) for batch in batches if batch.count])

    def fetch(self, batch: Batch) -> Any:
        return self._feed.fetch(self._samples(batch))

    def packed_batch(self, batch: Batch) -> PackedBatch:
        return packed_batch_of(self._feed, self._samples(batch))

    def close(self) -> None:
        """Do nothing: the feed of the data set is kept for other passes."""

    def _samples(self, batch: Batch) -> Batch:
        if self._ends is None:
            return batch
        start = int(self._ends[batch.start - 1]) if batch.start else 0
        return Batch(start, int(self._ends[batch.stop - 1]) - start)
