"""The effects that a policy yields to its driver, and the results that it receives.

A policy is a generator: it yields effects and receives their results. It does no I/O, holds no tensor
and reads no clock; the drivers (`rank`, lab, simulator) decide what an effect does and costs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True, slots=True)
class Batch:
    """A range of positions of the epoch's permutation: the samples of one step (none if `count` is 0)."""

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
        """Batches of `batch_size`; a last one of fewer than `least` samples is merged into the previous one.

        One sample has no variance: BatchNorm rejects it in training.
        """
        num = num_batches(self.count, batch_size, least=least)
        for number in range(num):
            start = self.start + number * batch_size
            yield Batch(start, (self.stop if number == num - 1 else start + batch_size) - start)


def num_batches(samples: int, batch_size: int, *, least: int = 2) -> int:
    """Number of batches in a lease of this number of samples."""
    whole, rest = divmod(samples, batch_size)
    return whole + (rest >= least or (rest > 0 and whole == 0))


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of a policy: its rank, the world size and the samples of a batch."""

    rank: int
    world_size: int
    batch_size: int


# Facts travel in the averaged buffer: after an average all ranks hold the same.


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """What one rank did since its last average."""

    samples: int
    batches: int
    compute_ms: float
    """Time of those batches, without averaging and waiting for others."""
    exposed_ms: float
    """Time that its previous average, and leases since, took from its compute path, including waits."""
    waited_ms: float = 0.0
    """The part of `exposed_ms` spent waiting for a background average."""
    average_ms: float = 0.0
    """Time of its previous average in the background, from its snapshot on, including waits for other ranks."""
    busy_ms: float = 0.0
    """Time that its previous background average cost its steps, on the processor or device they share."""
    setup_ms: float = 0.0
    """Time of steps that tell nothing about its speed: the first one, or those that captured a new shape."""
    paused_ms: float = 0.0
    """Time that the user's loop spent on something other than training; part of no other time."""
    border_ms: float = 0.0
    """Time in which it had taken its last step of a segment that stayed open, but other ranks had not."""
    loss_sum: float = 0.0
    """Losses times samples, as far as known by now; those of a GPU may come with a later report."""
    loss_samples: int = 0
    is_dry: bool = False
    """Whether no positions are left for it in this segment."""
    wants_stop: bool = False
    """Whether it asks to end the run here."""
    wants_pause: bool = False
    """Whether it asks to end the segment here: a checkpoint is due, and the next segment continues with the rest."""
    wants_layout: bool = False
    """Like `wants_pause`, but without a checkpoint: frozen or thawed parameters take effect between two segments."""


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
    """Whether the policy must end the segment, because another policy takes over."""

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
    """A decided value and its reason; goes to the timeline."""

    kind: str
    """plan, split, anchor, guard, alone or policy."""
    value: Any
    reason: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenWindow:
    """The unfinished window of one rank at the end of an epoch, with which the next epoch begins."""

    samples: int
    """Samples of this rank since its last average or snapshot."""
    unaccounted: int
    """Samples of all ranks in finished epochs for which no average has accounted."""
    flying: int | None = None
    """This rank's samples in an average still running in the background, if any."""


NEW_WINDOW = OpenWindow(samples=0, unaccounted=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Border:
    """The agreement after all ranks have taken their last step of the segment."""

    is_behind: bool
    """Another rank has applied an average that this rank has begun but not applied."""
    wants_end: bool
    """A rank wants to stop, save a checkpoint or change the layout: no window may stay open."""


# Effects. `at` is the position in the segment's epoch that the whole world has reached: the learning rate follows it.


@dataclass(frozen=True, slots=True)
class Take:
    """Lease up to `samples` positions from the shared ledger; the result is a Lease, or None if it ran dry.

    `share` is the rank's part of the world's speed. Near the end the ledger gives at most this part of the rest, and
    nothing to a rank too slow for one more batch.
    """

    samples: int
    share: float


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Return the unused end of the last lease, because the segment ends early."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Expect:
    """Announce the next batches of this rank, in order; a driver may prefetch them."""

    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Forward, backward and optimizer on one batch, local to the rank."""

    batch: Batch
    at: int


@dataclass(frozen=True, slots=True)
class SharedStep:
    """Gradient of one batch, averaged over all ranks by samples, then the optimizer; the result is an AverageReport.

    Every rank takes part, even with an empty batch.
    """

    batch: Batch
    at: int


@dataclass(frozen=True, slots=True)
class Average:
    """Meet all ranks, average, and continue from the mean; the result is an AverageReport."""

    samples: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Take a snapshot, and let the average run in the background."""

    samples: int
    is_dry: bool


@dataclass(frozen=True, slots=True)
class Poll:
    """Apply the last begun average if it is ready; the result is an AverageReport, or None."""


@dataclass(frozen=True, slots=True)
class Collect:
    """Wait for the last begun average and apply it; the result is an AverageReport."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Until the next Confer or HandOver only `source` works; it may use what the other ranks leave free."""

    source: int


@dataclass(frozen=True, slots=True)
class Confer:
    """Meet all ranks to exchange facts, without averaging; the result is an AverageReport.

    `source` works alone and continues; the others rest.
    """

    source: int
    samples: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """Meet all ranks, which take over everything that training changed on `source`; the result is an AverageReport.

    One rank worked alone while the others rested: afterwards it is as if all had taken its steps. With `may_wait` they
    take over only when all next share a step, merge or lease, if ever. So `source` can continue alone in the next
    segment at no cost; no other rank may step before the take-over.
    """

    source: int
    samples: int
    at: int
    may_wait: bool = False
    with_loop: bool = True
    """Whether they also take over what a user's loop sets on `source`: settings of parameter groups, ticks of
    schedules, accumulated gradients. Otherwise each loop goes on with its own."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Average float buffers and take the maximum of integer ones, at the end of a segment of shared steps."""

    samples: int


@dataclass(frozen=True, slots=True)
class EndSegment:
    """End the segment on all ranks before its last position; the next segment continues with the rest.

    The result is the ranges that are `left`. The driver knows them; a replay takes them from the recording.
    """

    left: tuple[Lease, ...] | None = None


@dataclass(frozen=True, slots=True)
class AwaitOthers:
    """After this rank's last step of the segment, wait until all ranks have taken theirs or the last average is ready.

    The result is a Border, or None if the average came first: others may wait for this rank to begin the next one.
    """


@dataclass(frozen=True, slots=True)
class LeaveOpen:
    """The last effect of a segment that ends without an average; the next segment continues this window."""

    window: OpenWindow | None = None


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
    | Rest
    | Confer
    | HandOver
    | Merge
    | EndSegment
    | AwaitOthers
    | LeaveOpen
    | Note
)
Policy = Generator[Effect, Any, None]
