"""The order of the positions of every epoch of a run: shuffled, as they are, or as the user's own order lists them.

Decides which feed an epoch has, and that all epochs of a run have one length. Called by `train()` and the lab; a
session opens every pass by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from outrider.data.feed import Feed
from outrider.data.order import in_order, shuffled
from outrider.data.sample_sequence import DrawnSequence, SampleSequence
from outrider.data.sequence_feed import SequenceFeed
from outrider.errors import ConfigError


class EpochOrders:
    """`begin()` an epoch, then `feed` and `order` are those of it."""

    def __init__(
        self,
        feed: Feed,
        *,
        order: Any,
        shuffle: bool,
        seed: int,
        agree: Callable[[DrawnSequence], DrawnSequence] = lambda drawn: drawn,
    ) -> None:
        """`agree` returns the sequence of all ranks, where they may draw different ones; all ranks then call this."""
        self._plain = self.feed = feed
        self.sequence = None if order is None else SampleSequence.of(order)
        """The user's own order."""
        self._shuffle = shuffle
        self._seed = seed
        self._agree = agree
        self.digest: str | None = None
        """Names the user's own order of this epoch; None without one."""
        self.num_positions = feed.num_samples if self.sequence is None else self._draw(0).num_positions
        """Of every epoch."""

    @property
    def name(self) -> str:
        """Of the user's own order."""
        assert self.sequence is not None
        return self.sequence.name

    @property
    def has_batches(self) -> bool:
        """Whether positions are whole batches of a batch sampler."""
        return self.sequence is not None and self.sequence.has_batches

    def trial_feed(self) -> Feed:
        """The feed whose first positions are tried before training; all ranks call this."""
        return SequenceFeed(self._plain, self._draw(0)) if self.has_batches else self._plain

    def refuse_other_lengths(self, num_epochs: int) -> None:
        """Look at the second epoch and the last one, before hours of training; every epoch is checked as it begins."""
        if self.sequence is not None:
            for epoch in sorted({1, num_epochs - 1} & set(range(1, num_epochs))):
                self._draw_like_first(epoch)

    def begin(self, epoch: int) -> Tensor:
        """The order of this epoch's positions; all ranks call this."""
        if self.sequence is None:
            count = self.num_positions
            return shuffled(count, seed=self._seed, epoch=epoch) if self._shuffle else in_order(count)
        drawn = self._draw_like_first(epoch)
        self.feed, self.digest = SequenceFeed(self._plain, drawn), drawn.digest
        return in_order(drawn.num_positions)

    def _draw_like_first(self, epoch: int) -> DrawnSequence:
        drawn = self._draw(epoch)
        if drawn.num_positions != self.num_positions:
            count = drawn.num_positions
            raise ConfigError(
                f"{self.name} lists {self.num_positions} {'batches' if self.has_batches else 'samples'} in epoch 0 and "
                f"{count} in epoch {epoch}, and all epochs of train() have one length",
                hint="use a Session, where epochs may differ: for batch in s.batches(dataset, order=...)",
            )
        return drawn

    def _draw(self, epoch: int) -> DrawnSequence:
        assert self.sequence is not None
        return self._agree(self.sequence.draw(num_samples=self._plain.num_samples, seed=self._seed, epoch=epoch))
