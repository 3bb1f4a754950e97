"""What a policy asks of its driver, and what it is told back.

A policy is a generator: it yields effects and receives their results. It does no I/O, holds no tensor
and reads no clock; the drivers (runtime, lab, simulate) decide what an effect costs and does.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Batch:
    """A range of positions of the epoch's permutation: the samples of one step (none where count is 0)."""

    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Lease:
    """A range of positions handed to a rank."""

    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count

    def batches(self, batch_size: int) -> Iterator[Batch]:
        for start in range(self.start, self.stop, batch_size):
            yield Batch(start, min(batch_size, self.stop - start))


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a policy sits: its rank, the size of its world, and the samples of a batch."""

    rank: int
    world_size: int
    batch_size: int


# Facts that ride in the buffer being averaged: after an average all ranks hold the same.


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """What one rank did since its last average."""

    samples: int
    batches: int
    compute_ms: float
    """Time of those batches; averaging and waiting for others excluded."""
    exposed_ms: float
    """What its previous average, and leases since, took out of its compute path, waiting included."""
    setup_ms: float = 0.0
    """Time of steps that say nothing about its speed: the first one, or those in which a new shape was captured."""
    is_dry: bool = False
    """No positions are left for it in this segment."""
    wants_stop: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What all ranks know after an average, identical on each."""

    window: int
    ranks: tuple[RankFacts, ...]
    drift: float | None = None
    """Weighted root mean square of ‖x_r − mean‖ / ‖mean‖; None where only gradients were averaged."""

    @property
    def samples(self) -> int:
        return sum(facts.samples for facts in self.ranks)

    @property
    def is_dry(self) -> bool:
        return all(facts.is_dry for facts in self.ranks)

    @property
    def wants_stop(self) -> bool:
        return any(facts.wants_stop for facts in self.ranks)


@dataclass(frozen=True, slots=True)
class Decision:
    """A value that was decided and why; goes to the timeline."""

    kind: str
    """plan, split, anchor, guard or alone."""
    value: Any
    reason: str
    details: dict[str, Any] = field(default_factory=dict)


# Effects. `at` is the position in the segment's epoch that the whole world has reached: the learning rate follows it.


@dataclass(frozen=True, slots=True)
class Take:
    """Lease up to `samples` positions from the shared ledger; the result is a Lease, or None when it ran dry.

    `share` is the rank's part of the world's speed: near the end the ledger gives no more than that of what is left,
    and nothing to a rank too slow for one more batch.
    """

    samples: int
    share: float


@dataclass(frozen=True, slots=True)
class Expect:
    """These batches come next on this rank, in this order: a driver may fetch them ahead."""

    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Forward, backward and optimizer on one batch, local to the rank."""

    batch: Batch
    at: int


@dataclass(frozen=True, slots=True)
class SharedStep:
    """Gradient of one batch, averaged over all ranks by samples, then the optimizer; the result is a Report.

    Every rank takes part, also with an empty batch.
    """

    batch: Batch
    at: int


@dataclass(frozen=True, slots=True)
class Average:
    """Meet all ranks, average, and go on from the mean; the result is a Report."""

    samples: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Snapshot, and let the average run in the background."""

    samples: int
    is_dry: bool


@dataclass(frozen=True, slots=True)
class Poll:
    """Take in the average begun last if it is there: a Report, or None."""


@dataclass(frozen=True, slots=True)
class Collect:
    """Wait for the average begun last and take it in; the result is a Report."""


@dataclass(frozen=True, slots=True)
class Confer:
    """Meet all ranks, who tell each other what they did, and nothing else; the result is a Report.

    `source` works alone and goes on, the others rest.
    """

    source: int
    samples: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """Meet all ranks, who take over everything that training changed on `source`; the result is a Report.

    One rank has worked alone, the others rested: afterwards it is as if all had taken its steps. A driver may put off
    the taking over until somebody needs it, so that `source` can go on alone in the next segment at no cost.
    """

    source: int
    samples: int
    at: int


@dataclass(frozen=True, slots=True)
class Merge:
    """Average float buffers and take the maximum of integer ones, at the end of a segment of shared steps."""

    samples: int


@dataclass(frozen=True, slots=True)
class Note:
    """Write a decision to the timeline."""

    decision: Decision


Effect = Take | Expect | Step | SharedStep | Average | Begin | Poll | Collect | Confer | HandOver | Merge | Note
Policy = Generator[Effect, Any, None]
