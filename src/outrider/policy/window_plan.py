"""The plan of a window, the user's options for it, and the distribution of the last batches of a segment.

The planner learns speeds and creates plans; policies read them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from outrider.errors import ConfigError
from outrider.policy.effects import Decision, Lease
from outrider.policy.weights import proportions

# Language models learn more in the same time from more samples than from shorter windows (docs/log.md).
OVERHEAD_TARGET = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerConfig:
    """The user's options for windows; a given `anchor` is never tuned, not even by the guard."""

    world_size: int
    batch_size: int
    """Batch size of every rank; the mean if `batch_sizes` gives one per rank."""
    is_blocking: bool
    """Whether all ranks wait for an average (cadence) or none does (async)."""
    anchor: int | None = None
    min_anchor: int = 1
    max_anchor: int = 200
    start_anchor: int = 2
    """The anchor until the cost of averages is known."""
    overhead_target: float = OVERHEAD_TARGET
    """The part of the time that averages may cost."""
    drift_threshold: float | None = None
    guard: bool = True
    max_batch_diff: int | None = None
    shares: tuple[float, ...] | None = None
    speed_hints: tuple[float, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    """Batch size of each rank, if they differ."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch size of each rank."""
        return self.batch_sizes or (self.batch_size,) * self.world_size

    def __post_init__(self) -> None:
        _at_least("world_size", self.world_size, 1)
        _at_least("batch_size", self.batch_size, 1)
        _at_least("min_anchor", self.min_anchor, 1)
        _at_least("start_anchor", self.start_anchor, 1)
        if self.anchor is not None:
            _at_least("anchor", self.anchor, 1)
        if self.max_batch_diff is not None:
            _at_least("max_batch_diff", self.max_batch_diff, 0)
        self._check_ranges()
        for name in ("shares", "speed_hints"):
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, proportions(name, values, world_size=self.world_size))

    def _check_ranges(self) -> None:
        if self.max_anchor < self.min_anchor:
            raise ConfigError(
                f"max_anchor must be >= min_anchor, got max_anchor={self.max_anchor}, min_anchor={self.min_anchor}",
                hint="raise max_anchor or leave min_anchor out",
            )
        if not 0 < self.overhead_target < 1:
            raise ConfigError(
                f"overhead_target must be between 0 and 1, got {self.overhead_target:g}",
                hint="0.10 lets averaging take a tenth of the time",
            )
        if self.drift_threshold is not None and not self.drift_threshold > 0:
            raise ConfigError(
                f"drift_threshold must be > 0, got {self.drift_threshold:g}",
                hint="leave it out for an automatic threshold, or pass guard=False",
            )


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """Batches and samples of each rank in one window, and why; `anchor`: batches of the slowest in a full window."""

    batches: tuple[int, ...]
    samples: tuple[int, ...]
    anchor: int
    reason: str
    stays_open: bool = False
    """Whether the window continues in the next epoch, because this one is too short."""

    @cached_property
    def total(self) -> int:
        return sum(self.samples)

    @cached_property
    def decision(self) -> Decision:
        """The plan for the timeline."""
        return Decision("plan", list(self.batches), self.reason, {"anchor": self.anchor})

    def lease(self, rank: int, start: int) -> Lease:
        """The rank's positions when all parts are laid out in rank order from `start`."""
        return Lease(start + self._offsets[rank], self.samples[rank])

    @cached_property
    def _offsets(self) -> list[int]:
        return list(accumulate(self.samples, initial=0))


def deal(
    remaining: int, batch_size: int, paces: Sequence[float], *, max_batch_diff: int | None = None
) -> tuple[int, ...]:
    """Samples of each rank if every remaining batch goes to the rank that finishes it first; some may get none."""
    if remaining <= 0:
        return (0,) * len(paces)
    counts = [0] * len(paces)
    queue = [(pace, rank) for rank, pace in enumerate(paces)]
    heapq.heapify(queue)
    num_full, last_size = divmod(remaining, batch_size)
    for _ in range(num_full):
        rank = _pop_allowed(queue, counts, max_batch_diff)
        counts[rank] += 1
        heapq.heappush(queue, ((counts[rank] + 1) * paces[rank], rank))
    samples = [count * batch_size for count in counts]
    if last_size == 1 and num_full:
        # Add the single sample to a batch of the rank with the shortest time: BatchNorm cannot train on one sample.
        samples[min((r for r in range(len(paces)) if counts[r]), key=lambda r: (counts[r] * paces[r], r))] += 1
    elif last_size:
        part = last_size / batch_size
        allowed = [rank for rank in range(len(paces)) if _is_allowed(rank, counts, max_batch_diff)]
        samples[min(allowed, key=lambda rank: (counts[rank] + part) * paces[rank])] += last_size
    return tuple(samples)


def _pop_allowed(queue: list[tuple[float, int]], counts: list[int], max_batch_diff: int | None) -> int:
    held = []
    entry = heapq.heappop(queue)
    while not _is_allowed(entry[1], counts, max_batch_diff):
        held.append(entry)
        entry = heapq.heappop(queue)
    for waiting in held:
        heapq.heappush(queue, waiting)
    return entry[1]


def _is_allowed(rank: int, counts: list[int], max_batch_diff: int | None) -> bool:
    # The rank with the fewest batches may always take one more; otherwise an odd batch could have no taker.
    return max_batch_diff is None or counts[rank] - min(counts) < max(1, max_batch_diff)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} must be >= {least}, got {value}", hint=f"give a whole number from {least} on")
