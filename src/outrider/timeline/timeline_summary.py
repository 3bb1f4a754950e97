"""The summary of a timeline: how each rank spent its time, what it waited for, and the changes of the anchor.

Decides how events are summed. The page and the command line format the numbers.
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
    """The summary of one rank."""

    rank: int
    device: str
    batches: int
    samples: int
    share: float | None
    """Share of all samples; None without samples."""
    compute_s: float
    """Time of the rank's steps, including data, throttle and kernels, without averages."""
    throttle_s: float
    averages: int
    """Number of averages with an event; averages inside shared steps have none."""
    average_ms: float | None
    """The median duration of these averages; averages that were merged into one event count with their mean."""
    waits_s: dict[str, float]
    gaps_s: dict[str, float] | None
    """Seconds in idle gaps by cause; None if utilization was not sampled."""


def summarize(timeline: Timeline) -> list[RankSummary]:
    """Summarize the time of each rank."""
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
            averages=sum(event.get("count", 1) for event in averages),
            average_ms=_median_ms(averages),
            waits_s=waits.get(rank, {}),
            gaps_s=gaps.get(rank),
        )
        for rank, (windows, averages) in by_rank.items()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchorChange:
    """A change of the anchor between two plans."""

    at_s: float
    before: int | None
    """The anchor before the change; None for the first plan."""
    after: int
    reason: str


def anchor_history(timeline: Timeline) -> list[AnchorChange]:
    """Every change of the anchor, with the reason from the plan or from the event that changed it."""
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


def _median_ms(averages: Sequence[Event]) -> float | None:
    """The median duration; exact for individual averages, while merged ones count `count` times with their mean."""
    if not any("count" in event for event in averages):
        return statistics.median(event["ms"] for event in averages) if averages else None
    means = sorted((event["ms"] / event.get("count", 1), event.get("count", 1)) for event in averages)
    half, seen = sum(count for _, count in means) / 2, 0
    for mean_ms, count in means:
        seen += count
        if seen >= half:
            return float(mean_ms)
    raise AssertionError("there is always a middle")


def _total(events: Sequence[Event], name: str) -> float:
    values: list[Any] = [event.get(name, 0) for event in events]
    return float(sum(values))
