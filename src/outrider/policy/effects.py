"""The effects that a policy yields to its driver, and the results that it receives.

A policy is a generator: it yields effects and receives their results. It does no I/O, holds no tensor
and reads no clock; the drivers (`rank`, lab, simulator) decide what an effect costs and does.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True, slots=True)
class Batch:
    """A range of positions of the epoch's permutation: the samples of one step (none if count is 0)."""

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

    def batches(self, batch_size: int, *, least: int = 2) -> Iterator[Batch]:
        """Batches of `batch_size`; a last one of fewer than `least` samples joins the one before it.

        One sample has no variance: BatchNorm refuses it in training.
        """
        num = num_batches(self.count, batch_size, least=least)
        for number in range(num):
            start = self.start + number * batch_size
            yield Batch(start, (self.stop if number == num - 1 else start + batch_size) - start)


def num_batches(samples: int, batch_size: int, *, least: int = 2) -> int:
    """How many batches a lease of so many samples has."""
    whole, rest = divmod(samples, batch_size)
    return whole + (rest >= least or (rest > 0 and whole == 0))


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
    waited_ms: float = 0.0
    """The part of `exposed_ms` that waited for an average in the background to be done."""
    average_ms: float = 0.0
    """How long its previous average took in the background, from its snapshot on, waiting for others included."""
    busy_ms: float = 0.0
    """Time that its previous average took from its steps in the background, on the processor or device they share."""
    setup_ms: float = 0.0
    """Time of steps that say nothing about its speed: the first one, or those in which a new shape was captured."""
    loss_sum: float = 0.0
    """Losses times samples, as far as they are known by now; those of a GPU may come with a later report."""
    loss_samples: int = 0
    is_dry: bool = False
    """No positions are left for it in this segment."""
    wants_stop: bool = False
    """The run is to end here."""
    wants_pause: bool = False
    """The segment is to end here: a checkpoint is due, and the next segment goes on with the rest."""
    wants_layout: bool = False
    """The same, without a checkpoint: parameters were frozen or thawed, which takes effect between two segments."""


@dataclass(frozen=True, kw_only=True)
class AverageReport:
    """What all ranks know after an average, identical on each.

    Simulated ranks share one report, so what follows from the facts of all ranks is computed once.
    """

    window: int
    ranks: tuple[RankFacts, ...]
    drift: float | None = None
    """Weighted root mean square of ‖x_r − mean‖ / ‖mean‖; None if only gradients were averaged."""
    is_last: bool = False
    """The policy that receives it is to end the segment, because another one takes over."""

    @cached_property
    def samples(self) -> int:
        return sum(facts.samples for facts in self.ranks)

    @cached_property
    def loss(self) -> float | None:
        """Mean loss of the samples whose loss is known; None if there are none."""
        samples = sum(facts.loss_samples for facts in self.ranks)
        return sum(facts.loss_sum for facts in self.ranks) / samples if samples else None

    @cached_property
    def is_dry(self) -> bool:
        return all(facts.is_dry for facts in self.ranks)

    @cached_property
    def wants_stop(self) -> bool:
        return any(facts.wants_stop for facts in self.ranks)

    @cached_property
    def wants_pause(self) -> bool:
        return any(facts.wants_pause for facts in self.ranks)

    @cached_property
    def wants_layout(self) -> bool:
        return any(facts.wants_layout for facts in self.ranks)

    @cached_property
    def ends_segment(self) -> bool:
        """Whether any rank wants the segment to end, or another policy takes over; all ranks end it then."""
        return self.is_last or self.wants_stop or self.wants_pause or self.wants_layout


@dataclass(frozen=True, slots=True)
class Decision:
    """A value that was decided and why; goes to the timeline."""

    kind: str
    """plan, split, anchor, guard, alone or policy."""
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
class GiveBack:
    """Return the end of the last lease, whose steps were not taken: the segment ends early."""

    lease: Lease


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
    """Gradient of one batch, averaged over all ranks by samples, then the optimizer; the result is an AverageReport.

    Every rank takes part, also with an empty batch.
    """

    batch: Batch
    at: int


@dataclass(frozen=True, slots=True)
class Average:
    """Meet all ranks, average, and go on from the mean; the result is an AverageReport."""

    samples: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Snapshot, and let the average run in the background."""

    samples: int
    is_dry: bool


@dataclass(frozen=True, slots=True)
class Poll:
    """Take in the average begun last if it is there: an AverageReport, or None."""


@dataclass(frozen=True, slots=True)
class Collect:
    """Wait for the average begun last and take it in; the result is an AverageReport."""


@dataclass(frozen=True, slots=True)
class Confer:
    """Meet all ranks, who tell each other what they did, and nothing else; the result is an AverageReport.

    `source` works alone and goes on, the others rest.
    """

    source: int
    samples: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """Meet all ranks, who take over everything that training changed on `source`; the result is an AverageReport.

    One rank has worked alone, the others rested: afterwards it is as if all had taken its steps. With `may_wait` they
    take over when all share a step again, merge or lease, if ever: so `source` can go on alone in the next segment at
    no cost, and nobody else may step before.
    """

    source: int
    samples: int
    at: int
    may_wait: bool = False


@dataclass(frozen=True, slots=True)
class Merge:
    """Average float buffers and take the maximum of integer ones, at the end of a segment of shared steps."""

    samples: int


@dataclass(frozen=True, slots=True)
class EndSegment:
    """The segment ends here on all ranks, before its last position; what is left of it comes in the next segment.

    The result are the ranges that are `left`. The driver knows them, except in a replay, where they were recorded.
    """

    left: tuple[Lease, ...] | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """Write a decision to the timeline."""

    decision: Decision


Effect = (
    Take
    | GiveBack
    | Expect
    | Step
    | SharedStep
    | Average
    | Begin
    | Poll
    | Collect
    | Confer
    | HandOver
    | Merge
    | EndSegment
    | Note
)
Policy = Generator[Effect, Any, None]
