"""A timeline in numbers: what each rank did, what it waited for, and how the anchor went.

Decides how events are added up; how the numbers look is the page's and the command line's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.timeline.document import Timeline
from outrider.timeline.idle import recorded_s, sampled_s
from outrider.timeline.spans import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSummary:
    """One rank's run."""

    rank: int
    device: str
    batches: int
    samples: int
    share: float | None
    """Part of all samples; None where there were none."""
    compute_s: float
    """Time of its steps: data, the throttle's sleep and kernels included, averages excluded."""
    throttle_s: float
    averages: int
    """Averages with an event of their own; those inside shared steps have none."""
    average_ms: float | None
    """The median of those."""
    waits_s: dict[str, float]
    gaps_s: dict[str, float] | None
    """None where nothing was sampled."""


def summarize(timeline: Timeline) -> list[RankSummary]:
    """What each rank did."""
    waits = recorded_s(timeline.events)
    gaps = sampled_s(timeline.utilization, timeline.gaps)
    by_rank = {rank: _own(timeline, rank) for rank in timeline.devices}
    total = sum(_total(windows, "samples") for windows, _ in by_rank.values())
    return [
        RankSummary(
            rank=rank,
            device=timeline.devices[rank],
            batches=round(_total(windows, "batches")),
            samples=round(_total(windows, "samples")),
            share=_total(windows, "samples") / total if total else None,
            compute_s=_total(windows, "compute_ms") / 1e3,
            throttle_s=_total(windows, "throttle_ms") / 1e3,
            averages=len(averages),
            average_ms=statistics.median(event["ms"] for event in averages) if averages else None,
            waits_s=waits.get(rank, {}),
            gaps_s=gaps.get(rank),
        )
        for rank, (windows, averages) in by_rank.items()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchorChange:
    """From one plan to the next the anchor became another."""

    at_s: float
    before: int | None
    """None at the first plan."""
    after: int
    reason: str


def anchor_history(timeline: Timeline) -> list[AnchorChange]:
    """Every change of the anchor, with the reason of the plan or of what moved it."""
    changes: list[AnchorChange] = []
    moved: Event | None = None
    for event in timeline.of_kind("plan", "anchor"):
        if event["kind"] == "anchor":
            moved = event
            continue
        before = changes[-1].after if changes else None
        if event.get("anchor") is not None and event["anchor"] != before:
            reason = str((moved or event).get("reason", ""))
            changes.append(AnchorChange(at_s=event["t"], before=before, after=event["anchor"], reason=reason))
        moved = None
    return changes


def _own(timeline: Timeline, rank: int) -> tuple[list[Event], list[Event]]:
    mine = [event for event in timeline.of_kind("window", "average end") if event["rank"] == rank]
    windows = [event for event in mine if event["kind"] == "window"]
    return windows, [event for event in mine if event["kind"] == "average end"]


def _total(events: Sequence[Event], name: str) -> float:
    values: list[Any] = [event.get(name, 0) for event in events]
    return float(sum(values))
