"""Completes the record of a run that ended: what the timeline tells, in few numbers, so that reports need no timeline.

Decides which numbers those are; events are added up by the timeline's own code. Knows no torch. Called by the suite
after each run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.timeline.document import Timeline
from outrider.timeline.idle import recorded_s, sampled_s
from outrider.timeline.summary import anchor_history

Epochs = Sequence[Mapping[str, Any]]


def measured(timeline: Mapping[str, Any], epochs: Epochs) -> dict[str, Any]:
    """The block `measured` of a record, from `timeline.json`; peers keep none, for them the epochs have to do."""
    whole = Timeline(name="", events=timeline.get("events", []), utilization=timeline.get("utilization"))
    return {
        "idle_s_by_rank": _by_rank(recorded_s(whole.events)) or _idle_from_epochs(epochs),
        "sampled_idle_s_by_rank": _by_rank(sampled_s(whole.utilization, whole.gaps)),
        "average_ms": _average_ms(whole.events) or _average_ms_from_epochs(epochs),
        "anchors": [change.after for change in anchor_history(whole)],
    }


def _by_rank(seconds: Mapping[int, Mapping[str, float]]) -> list[dict[str, float]]:
    return [{cause: round(value, 4) for cause, value in seconds[rank].items()} for rank in sorted(seconds)]


def _idle_from_epochs(epochs: Epochs) -> list[dict[str, float]]:
    """Only the mean over the ranks is known of a run without a timeline: each rank is given that."""
    if not epochs or any(epoch["wait_fraction"] is None for epoch in epochs):
        return []
    waited_s = sum(epoch["wait_fraction"] * epoch["seconds"] for epoch in epochs)
    return [{"average": round(waited_s, 4)} for _ in epochs[0]["share_by_rank"]]


def _average_ms(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Mean time of an average without the wait for others: the last rank to come waited for nobody."""
    by_window: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event["kind"] == "average end":
            by_window[event["window"]].append(event["ms"])
    least = [min(times) for times in by_window.values()]
    return round(sum(least) / len(least), 4) if least else None


def _average_ms_from_epochs(epochs: Epochs) -> float | None:
    """Of averages in every step, too many for an event each: what they took from the ranks, by their number."""
    averages = sum(epoch["averages"] for epoch in epochs)
    if not averages or any(epoch["exposed_average_fraction"] is None for epoch in epochs):
        return None
    taken_s = sum(epoch["exposed_average_fraction"] * epoch["seconds"] for epoch in epochs)
    return float(round(taken_s * 1e3 / averages, 4))
