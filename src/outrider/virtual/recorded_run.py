"""Replays a recorded run in the lab, and reports where it differs from the recording.

Decides what is compared: the drift of every average, and the bits of the model at the end of every segment. Other float
types, library versions or thread counts make a replay differ. Called by `outrider.replay()`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.data.epoch_pass import EpochPass
from outrider.errors import DataError, OutriderError
from outrider.policy.effects import AverageReport, Batch, Lease
from outrider.policy.schedule import Entry, SegmentEnd, common_part, drifts_of, end_of, num_meetings
from outrider.replica.model_digest import digest_of
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench, Lab
from outrider.virtual.lab_replicas import ReplicaWork

SAME_DRIFT = 1e-5
"""Relative tolerance for drifts: threads may sum these norms in another order; real differences are far larger."""

NEAR_DRIFT = 0.05
"""The tolerance if the recording is from another kind of device, which rounds sums differently."""


@dataclass(frozen=True, slots=True)
class RecordedSegment:
    """A part of an epoch, as all ranks recorded it."""

    epoch: int
    span: Lease
    is_unmerged: bool
    ranks: tuple[tuple[Entry, ...], ...]

    @property
    def end(self) -> SegmentEnd | None:
        """How the segment ended, from a rank that was not behind; None if the recording stops inside the segment."""
        ends = [end_of(entries) for entries in self.ranks]
        if any(end is None for end in ends):
            return None
        return next((end for end in ends if end is not None and end.digest is not None), ends[0])


@dataclass(frozen=True, slots=True)
class StepLoss:
    """The loss of one step of one rank."""

    epoch: int
    rank: int
    at: int
    """Samples of the whole world before the step, in its epoch."""
    batch: Batch
    """Positions in the order of the epoch."""
    loss: float


@dataclass(frozen=True, slots=True)
class ReplayedEpoch:
    """An epoch of a replay; `departure` describes where it first differs from the recording, if it does."""

    epoch: int
    loss: float
    averages: int
    has_same_bits: bool | None
    """Whether the model had the recorded bits at the end of each part; None where no bits were compared."""
    departure: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """The result of a replay in the lab."""

    epochs: tuple[ReplayedEpoch, ...]
    steps: tuple[StepLoss, ...] = field(repr=False)
    recorded_on: str | None
    """The device of the recording, if a CPU cannot reproduce its bits; None if all ranks were on CPUs."""
    error: OutriderError | None
    """The error that ended the replay early, for example a loss that is not finite."""
    model: torch.nn.Module = field(repr=False)

    @property
    def departure(self) -> str | None:
        """A description of the first difference from the recording; None if there is none."""
        return next((epoch.departure for epoch in self.epochs if epoch.departure is not None), None)

    @property
    def highest(self) -> StepLoss | None:
        """The step with the highest loss."""
        return max(self.steps, key=lambda step: math.inf if math.isnan(step.loss) else step.loss, default=None)


def read_recording(path: Path) -> list[RecordedSegment]:
    """Read the schedule of a run, as its ranks recorded it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        marks, segments = document["marks"], document["segments"]
        return [
            RecordedSegment(epoch, Lease(start, count), is_unmerged, tuple(tuple(rank) for rank in ranks))
            for (epoch, start, count, is_unmerged), ranks in zip(marks, segments, strict=True)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a schedule that can be replayed: {error}", hint="record the run again"
        ) from error


def replay_run(
    recipe: Recipe,
    segments: Sequence[RecordedSegment],
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    recorded_on: str | None = None,
) -> Replay:
    """Replay a recording in this process on the CPU; `recorded_on` names another kind of device, if it used one."""
    _refuse_partial(segments)
    work = _WatchedWork(recipe, world_size=len(segments[0].ranks), collate=collate)
    lab = _ReplayLab(recipe, work, is_exact=recorded_on is None)
    epochs: list[ReplayedEpoch] = []
    error = None
    for epoch in range(segments[-1].epoch + 1):
        parts = [segment for segment in segments if segment.epoch == epoch]
        try:
            epochs.append(lab.run_epoch(epoch, parts))
        except OutriderError as problem:
            error = problem
            break
    return Replay(
        epochs=tuple(epochs),
        steps=tuple(work.losses),
        recorded_on=recorded_on,
        error=error,
        model=work.replicas[0].model,
    )


def _refuse_partial(segments: Sequence[RecordedSegment]) -> None:
    if not segments or not any(entries for entries in segments[0].ranks):
        raise DataError("the recording is empty", hint="let the run take some steps before it ends")
    first = segments[0]
    if first.epoch > 0 or first.span.start > 0:
        raise DataError(
            f"the recording begins at epoch {first.epoch}, sample {first.span.start}, where the run was resumed",
            hint="a replay needs a run from its first step: record one that is not resumed",
        )
    if any(segment.is_unmerged for segment in segments):
        raise DataError(
            "the run saved a checkpoint in the middle of an epoch of shared steps, which a replay cannot repeat",
            hint="record it with checkpoint_every a whole number of epochs",
        )


class _WatchedWork(ReplicaWork):
    """Does the work of replicas and keeps the loss of every step."""

    def __init__(self, recipe: Recipe, *, world_size: int, collate: Callable[[list[Any]], Any] | None) -> None:
        super().__init__(recipe, world_size=world_size, collate=collate)
        self.epoch = 0
        self.losses: list[StepLoss] = []

    def step(self, rank: int, batch: Batch, at: int) -> None:
        try:
            super().step(rank, batch, at)
        finally:
            self._keep(rank, batch, at)

    def gradient(self, rank: int, batch: Batch, at: int) -> None:
        try:
            super().gradient(rank, batch, at)
        finally:
            self._keep(rank, batch, at)

    def _keep(self, rank: int, batch: Batch, at: int) -> None:
        total, samples = self.replicas[rank].loss_sums.since_last()
        if samples:
            self.losses.append(StepLoss(self.epoch, rank, at, batch, total / samples))


class _ReplayLab:
    """Replays the recorded segments, epoch by epoch, and compares the results."""

    def __init__(self, recipe: Recipe, work: _WatchedWork, *, is_exact: bool) -> None:
        self._work = work
        self._is_exact = is_exact
        self._lab = Lab(recipe, Bench(speeds=(1.0,) * work.size), work=work)
        self._lab.on_report = self._saw_report
        self._drifts: list[float] = []
        """Drifts not compared yet: in the recording, rank 0 may have applied the last average in the next epoch."""
        self._averages = 0
        self._met = [0] * work.size

    def _saw_report(self, report: AverageReport) -> None:
        if report.drift is not None:
            self._drifts.append(report.drift)

    def run_epoch(self, epoch: int, parts: Sequence[RecordedSegment]) -> ReplayedEpoch:
        self._work.epoch = epoch
        first_step, averages_before = len(self._work.losses), self._averages
        current = self._lab.begin_epoch(epoch)
        found: list[str] = []
        compared: list[bool] = []
        for part in parts:
            departure, has_same_bits = self._run_part(current, part)
            found += [] if departure is None else [departure]
            compared += [] if has_same_bits is None else [has_same_bits]
        for replica in self._work.replicas:
            replica.loss_sums.drain()
        steps = self._work.losses[first_step:]
        samples = sum(step.batch.count for step in steps)
        return ReplayedEpoch(
            epoch=epoch,
            loss=sum(step.loss * step.batch.count for step in steps) / max(samples, 1),
            averages=self._averages - averages_before,
            has_same_bits=all(compared) if compared else None,
            departure=found[0] if found else None,
        )

    def _run_part(self, current: EpochPass, part: RecordedSegment) -> tuple[str | None, bool | None]:
        """Replay a segment; returns where it differs, and whether the model has the recorded bits at its end.

        None where they are not compared: on another kind of device, and where no bits were recorded because windows
        stay open or the recording was cut off.
        """
        end = part.end
        entries = common_part(part.ranks, met_before=self._met) if end is None else part.ranks
        self._met = [before + num_meetings(rank) for before, rank in zip(self._met, part.ranks, strict=True)]
        self._lab.run_segment(current, current.span_to(part.span.stop), entries=entries)
        current.end_segment(() if end is None else end.left)
        departure = self._departure(part.epoch, drifts_of(part.ranks[0]))
        if not self._is_exact or end is None or end.digest is None:
            return departure, None
        has_same_bits = digest_of(self._work.replicas[0].model) == end.digest
        if not has_same_bits and departure is None:
            where = f"epoch {part.epoch}, up to sample {part.span.stop}"
            departure = f"{where}: the model has other bits than the recorded one"
        return departure, has_same_bits

    def _departure(self, epoch: int, recorded: Sequence[float]) -> str | None:
        """Compare the averages that rank 0 applied since the last comparison."""
        tolerance = SAME_DRIFT if self._is_exact else NEAR_DRIFT
        first = self._averages
        taken_in = self._drifts[: len(recorded)] if self._lab.is_open else self._drifts
        self._drifts = self._drifts[len(taken_in) :]
        self._averages += len(taken_in)
        for number, (drift, expected) in enumerate(zip(taken_in, recorded, strict=False), start=first):
            if not math.isclose(drift, expected, rel_tol=tolerance):
                return f"epoch {epoch}, average {number}: the drift is {drift:.6g}, not {expected:.6g} as recorded"
        return None


COLUMNS = ("epoch", "rank", "at", "position", "samples", "loss")


def as_rows(steps: Sequence[StepLoss]) -> list[dict[str, Any]]:
    """Convert losses to table rows, one per step."""
    return [
        dict(zip(COLUMNS, (one.epoch, one.rank, one.at, one.batch.start, one.batch.count, one.loss), strict=True))
        for one in steps
    ]
