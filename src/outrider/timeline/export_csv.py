"""A timeline as a table: one row per event, span, sample and idle gap, for spreadsheets and data frames.

Decides the columns. What belongs to one kind only is in `details`, as JSON.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

from outrider.timeline.document import Timeline

COLUMNS = ("start_s", "end_s", "rank", "device", "kind", "value", "cause", "epoch", "window", "reason", "details")
_OWN = {"t", "rank", "kind", "start", "value", "cause", "epoch", "window", "reason"}


def as_csv(timeline: Timeline) -> str:
    """The whole timeline, in the order of time."""
    rows = sorted(_rows(timeline), key=lambda row: (row["start_s"], row["rank"]))
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _rows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    devices = timeline.devices
    for event in timeline.events:
        yield _event_row(dict(event), devices.get(event["rank"], ""))
    for rank, device in devices.items():
        for t, percent in zip(*timeline.percents(rank), strict=True):
            yield {"start_s": t, "end_s": t, "rank": rank, "device": device, "kind": "utilization", "value": percent}
    for gap in timeline.gaps:
        yield {
            "start_s": gap.start_s,
            "end_s": gap.end_s,
            "rank": gap.rank,
            "device": devices.get(gap.rank, ""),
            "kind": "idle gap",
            "value": round(gap.seconds * 1e3, 3),
            "cause": gap.cause,
        }


def _event_row(event: dict[str, Any], device: str) -> dict[str, Any]:
    """The value of an event that lasted is its milliseconds."""
    details = {name: value for name, value in event.items() if name not in _OWN}
    row = {name: event[name] for name in ("rank", "kind", "cause", "epoch", "window", "reason") if name in event}
    value = event.get("value", details.pop("ms", ""))
    return row | {
        "start_s": event.get("start", event["t"]),
        "end_s": event["t"],
        "device": device,
        "value": value if isinstance(value, (int, float, str)) else json.dumps(value),
        "details": json.dumps(details) if details else "",
    }
