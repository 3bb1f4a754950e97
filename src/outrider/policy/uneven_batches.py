"""Deals the last samples of a segment if ranks have batches of different sizes.

Decides how many samples each rank gets; no clock, no I/O. Called by the window planner. If all ranks have one size,
`window_plan.deal` does this.
"""

from __future__ import annotations

from collections.abc import Sequence


def deal_by_size(
    remaining: int, sizes: Sequence[int], paces: Sequence[float], *, max_batch_diff: int | None = None
) -> tuple[int, ...]:
    """Samples of each rank if every remaining batch goes to the rank that finishes it first; some may get none.

    `paces` are ms per batch of the rank's own size. No rank gets a last batch of a single sample, unless batches have
    one: BatchNorm cannot train on it.
    """
    samples, counts = [0] * len(sizes), [0] * len(sizes)
    left = max(0, remaining)
    while left > 0:
        allowed = [rank for rank in range(len(sizes)) if _may_lead(counts, rank, max_batch_diff)]
        rank = min(allowed, key=lambda r: (_end_ms(samples[r] + min(sizes[r], left), sizes[r], paces[r]), r))
        taken = min(sizes[rank], left)
        if left - taken == 1 and sizes[rank] > 1:
            taken += 1
        samples[rank] += taken
        counts[rank] += 1
        left -= taken
    return tuple(samples)


def _end_ms(samples: int, size: int, pace: float) -> float:
    return samples / size * pace


def _may_lead(counts: Sequence[int], rank: int, max_batch_diff: int | None) -> bool:
    # The rank with the fewest batches may always take one more; otherwise an odd batch could have no taker.
    return max_batch_diff is None or counts[rank] - min(counts) < max(1, max_batch_diff)
