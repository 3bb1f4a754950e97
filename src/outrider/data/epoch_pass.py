"""One pass over a data set, divided into segments by checkpoints and interruptions.

Decides which positions come next after a segment that ended early. An epoch of `train()` is one pass; a session opens a
pass for every call of `batches()`. A step source takes the steps, and `RankLife` saves checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from outrider.data.feed import Feed
from outrider.data.order import with_rest
from outrider.policy.effects import Lease
from outrider.policy.remaining import Remaining
from outrider.policy.segments import segments


class EpochPass:
    """The current pass on this rank; all ranks open the same segments in the same order."""

    def __init__(
        self,
        *,
        epoch: int,
        batch_size: int,
        feed: Feed,
        order: Tensor,
        remaining: Remaining,
        stop: int,
        seen: int,
        samples_after: int | None = None,
    ) -> None:
        self.epoch = epoch
        self.batch_size = batch_size
        self.feed = feed
        self.seen = seen
        """Samples of the whole world before this pass."""
        self._samples_after = samples_after
        self._remaining = remaining
        self._stop = stop
        self._began_at = remaining.position
        self._started_s = time.perf_counter()
        self._order = order
        self._span = Lease(0, 0)
        self._lay_out()

    @property
    def remaining(self) -> Remaining:
        """The positions that no segment has used yet."""
        return self._remaining

    @property
    def left(self) -> int:
        """Samples until the end of the pass, which is the end of the data or of the run."""
        return max(0, min(self._remaining.count, self._stop - self._remaining.position))

    @property
    def began_at(self) -> int:
        """The position at which the pass began, or continued from a checkpoint."""
        return self._began_at

    @property
    def seconds(self) -> float:
        """Training time since the pass began, or continued from a checkpoint."""
        return time.perf_counter() - self._started_s

    def restart_time(self) -> None:
        """Restart the clock of the pass; called when all ranks have arrived."""
        self._started_s = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Exclude this much of the time since the beginning, because it was not training."""
        self._started_s += seconds

    def next_span(self, *, every: float | None, unit: int) -> Lease:
        """Begin the next segment, which ends at the next checkpoint (one per `every` of an epoch) or with the pass."""
        rest = Lease(self._remaining.position, self.left)
        self._span = next(segments(rest, num_samples=self._remaining.end, every=every, unit=unit), rest)
        return self._span

    @property
    def samples_after(self) -> int | None:
        """Samples of the run after the current segment; None if the length of the run is not known."""
        return None if self._samples_after is None else self._samples_after + self.left - self._span.count

    def span_to(self, stop: int) -> Lease:
        """Begin the next segment, which ends at this position."""
        self._span = Lease(self._remaining.position, stop - self._remaining.position)
        return self._span

    def rest_after(self, left: Sequence[Lease]) -> Remaining:
        """The positions that would remain in the pass if its segment ended now and left these positions."""
        beyond = Lease(self._span.stop, self._remaining.end - self._span.stop)
        return self._remaining.after([*left, beyond])

    def end_segment(self, left: Sequence[Lease]) -> None:
        """End the current segment; the positions that it `left` come first when the pass continues."""
        self._remaining = self.rest_after(left)
        if not self._remaining.is_in_order:
            self._lay_out()

    def _lay_out(self) -> None:
        """Give the feed the order of the remaining positions, at the start and after a segment that ended early."""
        self.feed.start_epoch(with_rest(self._order, self._remaining), self.epoch)
