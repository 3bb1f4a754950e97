"""The order of positions in every epoch of a run: shuffled, the data set's own, or the user's own order.

Decides which feed an epoch uses, and ensures that all epochs of a run have the same length. Called by `train()` and the
lab; a session opens every pass by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from outrider.data.feed import Feed
from outrider.data.order import in_order, shuffled
from outrider.data.sample_sequence import DrawnSequence, SampleSequence, batching_options
from outrider.data.sequence_feed import SequenceFeed
from outrider.errors import ConfigError


class EpochOrders:
    """`begin()` starts an epoch: it sets `feed` and returns the order of positions."""

    def __init__(
        self,
        feed: Feed,
        *,
        order: Any,
        shuffle: bool,
        seed: int,
        agree: Callable[[DrawnSequence], DrawnSequence] = lambda drawn: drawn,
    ) -> None:
        """`agree` returns one sequence for all ranks, which may have drawn different ones; all ranks call it."""
        self._plain = self.feed = feed
        self.sequence = None if order is None else SampleSequence.of(order)
        """The user's own order."""
        self._shuffle = shuffle
        self._seed = seed
        self._agree = agree
        self.digest: str | None = None
        """A digest of the user's own order in this epoch; None without one."""
        first = None if self.sequence is None else self._draw(0)
        self.num_positions = feed.num_samples if first is None else first.num_positions
        """The number of positions in every epoch."""
        self.batching = {} if first is None or not self.has_batches else batching_options(self.name, first)
        """The options that describe the batches of a batch sampler in its first epoch; empty without one."""

    @property
    def name(self) -> str:
        """The name of the user's own order."""
        assert self.sequence is not None
        return self.sequence.name

    @property
    def has_batches(self) -> bool:
        """Whether positions are whole batches of a batch sampler."""
        return self.sequence is not None and self.sequence.has_batches

    def trial_feed(self) -> Feed:
        """The feed whose first positions are used for trial steps before training; all ranks call this."""
        return SequenceFeed(self._plain, self._draw(0)) if self.has_batches else self._plain

    def refuse_other_lengths(self, num_epochs: int) -> None:
        """Check the lengths of the second and the last epoch before hours of training; `begin` checks every epoch."""
        if self.sequence is not None:
            for epoch in sorted({1, num_epochs - 1} & set(range(1, num_epochs))):
                self._draw_like_first(epoch)

    def begin(self, epoch: int) -> Tensor:
        """Begin an epoch and return the order of its positions; all ranks call this."""
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
