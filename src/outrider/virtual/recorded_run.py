"""Replays a recorded run in the lab, and says where it departs from what was recorded.

Decides what is compared: the drift of every average, and the bits of the model at the end of every segment. A run of
other floats, another library or another number of threads departs. Called by `outrider.replay()`.
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
from outrider.policy.schedule import Entry, SegmentEnd, common_part, drifts_of, end_of
from outrider.replica.model_digest import digest_of
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench, Lab
from outrider.virtual.lab_replicas import ReplicaWork

SAME_DRIFT = 1e-5
"""Drifts are norms, which several threads may sum in another order; a departure of parameters is far larger."""

NEAR_DRIFT = 0.05
"""The same where the recording is from another kind of device, whose sums are rounded in another way."""


@dataclass(frozen=True, slots=True)
class RecordedSegment:
    """A part of an epoch, as all ranks recorded it."""

    epoch: int
    span: Lease
    is_unmerged: bool
    ranks: tuple[tuple[Entry, ...], ...]

    @property
    def end(self) -> SegmentEnd | None:
        """How it ended, by a rank that was not behind another; None where the recording ends within it."""
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
    """An epoch of a replay; `departure` says where it first differs from the recording, if it does."""

    epoch: int
    loss: float
    averages: int
    has_same_bits: bool
    departure: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A run that was done again in the lab."""

    epochs: tuple[ReplayedEpoch, ...]
    steps: tuple[StepLoss, ...] = field(repr=False)
    recorded_on: str | None
    """The device of the recording whose bits a CPU does not have; None if all ranks were on CPUs."""
    error: OutriderError | None
    """What ended the replay early, such as a loss that is not finite."""
    model: torch.nn.Module = field(repr=False)

    @property
    def departure(self) -> str | None:
        """Where the replay first differs from the recording; None if it has the same bits."""
        return next((epoch.departure for epoch in self.epochs if epoch.departure is not None), None)

    @property
    def highest(self) -> StepLoss | None:
        """The step with the highest loss."""
        return max(self.steps, key=lambda step: math.inf if math.isnan(step.loss) else step.loss, default=None)


def read_recording(path: Path) -> list[RecordedSegment]:
    """The schedule of a run, as its ranks recorded it."""
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
    """Do again what was recorded, in this process, on the CPU; `recorded_on` names another kind of device, if any."""
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
    """The work of replicas; keeps the loss of every step."""

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
    """Runs the recorded segments of one epoch after the other, and compares."""

    def __init__(self, recipe: Recipe, work: _WatchedWork, *, is_exact: bool) -> None:
        self._work = work
        self._is_exact = is_exact
        self._lab = Lab(recipe, Bench(speeds=(1.0,) * work.size), work=work)
        self._lab.on_report = self._saw_report
        self._drifts: list[float] = []
        self._averages = 0

    def _saw_report(self, report: AverageReport) -> None:
        if report.drift is not None:
            self._drifts.append(report.drift)

    def run_epoch(self, epoch: int, parts: Sequence[RecordedSegment]) -> ReplayedEpoch:
        self._work.epoch = epoch
        first_step, averages_before = len(self._work.losses), self._averages
        current = self._lab.begin_epoch(epoch)
        found: list[str] = []
        is_same = True
        for part in parts:
            departure, has_same_bits = self._run_part(current, part)
            found += [] if departure is None else [departure]
            is_same = is_same and has_same_bits
        for replica in self._work.replicas:
            replica.loss_sums.drain()
        steps = self._work.losses[first_step:]
        samples = sum(step.batch.count for step in steps)
        return ReplayedEpoch(
            epoch=epoch,
            loss=sum(step.loss * step.batch.count for step in steps) / max(samples, 1),
            averages=self._averages - averages_before,
            has_same_bits=is_same,
            departure=found[0] if found else None,
        )

    def _run_part(self, current: EpochPass, part: RecordedSegment) -> tuple[str | None, bool]:
        """Replay a segment; returns where it departs, and whether the model has the recorded bits at its end."""
        self._drifts = []
        end = part.end
        entries = common_part(part.ranks) if end is None else part.ranks
        self._lab.run_segment(current, current.span_to(part.span.stop), entries=entries)
        current.end_segment(() if end is None else end.left)
        departure = self._departure(part.epoch, drifts_of(part.ranks[0]))
        self._averages += len(self._drifts)
        if not self._is_exact or end is None or end.digest is None:
            return departure, self._is_exact and departure is None
        has_same_bits = digest_of(self._work.replicas[0].model) == end.digest
        if not has_same_bits and departure is None:
            where = f"epoch {part.epoch}, up to sample {part.span.stop}"
            departure = f"{where}: the model has other bits than the recorded one"
        return departure, has_same_bits

    def _departure(self, epoch: int, recorded: Sequence[float]) -> str | None:
        tolerance = SAME_DRIFT if self._is_exact else NEAR_DRIFT
        for number, (drift, expected) in enumerate(zip(self._drifts, recorded, strict=False)):
            if not math.isclose(drift, expected, rel_tol=tolerance):
                return (
                    f"epoch {epoch}, average {self._averages + number}: the drift is {drift:.6g}, "
                    f"not {expected:.6g} as recorded"
                )
        return None


COLUMNS = ("epoch", "rank", "at", "position", "samples", "loss")


def as_rows(steps: Sequence[StepLoss]) -> list[dict[str, Any]]:
    """For a table: one row per step."""
    return [
        dict(zip(COLUMNS, (one.epoch, one.rank, one.at, one.batch.start, one.batch.count, one.loss), strict=True))
        for one in steps
    ]
