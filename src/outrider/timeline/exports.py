"""Writes a timeline in formats for people and tools: CSV, Chrome trace events for Perfetto, and a web page.

Decides which formats exist and what CSV and trace events contain; `export_html` writes the page. Called at the end of a
run and by `outrider timeline`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, one_of
from outrider.timeline.document import TIMELINE, Timeline, find_event_files, load_timeline
from outrider.timeline.export_html import write_html
from outrider.timeline.idle import recorded_s, sampled_s
from outrider.timeline.recorder import SCHEMA_VERSION
from outrider.timeline.sampler import Sampler
from outrider.timeline.spans import LANES, Span
from outrider.timeline.timeline_files import RECORD, read_json, write_text
from outrider.timeline.web_page import has_plotly

COLUMNS = ("start_s", "end_s", "rank", "device", "kind", "value", "cause", "epoch", "window", "reason", "details")
_OWN = {"t", "rank", "kind", "start", "value", "cause", "epoch", "window", "reason"}


def as_csv(timeline: Timeline) -> str:
    """The whole timeline as CSV, ordered by time."""
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
    """The row of an event; if the event has a duration, the value is its milliseconds."""
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


WORLD = 0
"""The process number for events of all ranks; rank r is process r + 1."""
_IDLE = len(LANES)
_MARKS = ("anchor", "guard", "split", "alone", "compensation", "checkpoint", "resume")


def as_trace(timeline: Timeline) -> str:
    """The timeline in the JSON object form of the trace event format."""
    trace = {"displayTimeUnit": "ms", "otherData": {"run": timeline.name}, "traceEvents": list(_events(timeline))}
    return json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n"


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield from _names(timeline)
    for span in timeline.spans:
        yield _complete(span)
    for gap in timeline.gaps:
        yield _slice(gap.rank, _IDLE, f"idle: {gap.cause}", gap.start_s, gap.end_s, {"cause": gap.cause})
    yield from _epochs(timeline)
    yield from _counters(timeline)
    for event in timeline.of_kind(*_MARKS):
        args = {name: value for name, value in event.items() if name not in ("t", "rank", "kind")}
        where = {"pid": WORLD, "tid": 1, "ts": _us(event["t"]), "s": "p"}
        yield {"ph": "i", "name": event["kind"], "cat": "decision", **where, "args": _finite(args)}


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", WORLD, 0, name=f"run {timeline.name}")
    yield _meta("process_sort_index", WORLD, 0, sort_index=WORLD)
    yield _meta("thread_name", WORLD, 0, name="epochs")
    yield _meta("thread_name", WORLD, 1, name="decisions")
    for rank, device in timeline.devices.items():
        yield _meta("process_name", rank + 1, 0, name=f"rank {rank} ({device})")
        yield _meta("process_sort_index", rank + 1, 0, sort_index=rank + 1)
        for thread, lane in enumerate((*LANES, "idle")):
            yield _meta("thread_name", rank + 1, thread, name=lane)


def _meta(kind: str, pid: int, tid: int, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _complete(span: Span) -> dict[str, Any]:
    name = f"wait: {span.name}" if span.lane == "wait" else span.name
    name = name if span.merged_s is None else f"{span.count} × {name}"
    return _slice(span.rank, LANES.index(span.lane), name, span.start_s, span.end_s, dict(span.facts))


def _slice(
    rank: int, thread: int, name: str, start_s: float, end_s: float, args: dict[str, Any], *, category: str = "rank"
) -> dict[str, Any]:
    start_us = _us(start_s)
    where = {"pid": rank + 1, "tid": thread, "ts": start_us, "dur": max(0, _us(end_s) - start_us)}
    return {"ph": "X", "name": name, "cat": category, **where, "args": _finite(args)}


def _epochs(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The epochs of rank 0, with their results."""
    mine = [event for event in timeline.of_kind("epoch start", "epoch end") if event["rank"] == 0]
    started_s: dict[int, float] = {}
    for event in mine:
        if event["kind"] == "epoch start":
            started_s[event["epoch"]] = event["t"]
        elif "count" in event:
            name = f"epochs {event['first']} to {event['epoch']}"
            yield _slice(WORLD - 1, 0, name, event["start"], event["t"], {"count": event["count"]}, category="epoch")
        elif event["epoch"] in started_s:
            args = {"loss": event.get("loss"), "eval": event.get("eval")}
            start_s = started_s[event["epoch"]]
            yield _slice(WORLD - 1, 0, f"epoch {event['epoch']}", start_s, event["t"], args, category="epoch")


def _counters(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank in timeline.devices:
        for t, percent in zip(*timeline.percents(rank), strict=True):
            if percent is not None:
                yield _counter(rank + 1, "utilization %", t, percent)
    for plan in timeline.of_kind("plan"):
        if plan.get("anchor") is not None:
            yield _counter(WORLD, "anchor", plan["t"], plan["anchor"])


def _counter(pid: int, name: str, t: float, value: float) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(t), "args": {name: value}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _finite(args: dict[str, Any]) -> dict[str, Any]:
    """Remove values that JSON cannot represent."""
    return {name: value for name, value in args.items() if not (isinstance(value, float) and value - value != 0)}


FORMATS = ("json", "csv", "html", "perfetto")


def parse_formats(text: str) -> tuple[str, ...]:
    """Parse names of formats, separated by commas."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in FORMATS:
            raise ConfigError(f"unknown format {name!r}", hint=one_of(name, FORMATS, what="formats"))
    if not names:
        raise ConfigError("no format given", hint=f"formats are {', '.join(FORMATS)}")
    return names


def export(timeline: Timeline, folder: Path, formats: Iterable[str]) -> list[Path]:
    """Write the timeline into the folder in each format; returns the files."""
    return [_write(timeline, folder, name) for name in formats]


_TEXTS = {"csv": ("timeline.csv", as_csv), "perfetto": ("trace.json", as_trace)}


def _write(timeline: Timeline, folder: Path, name: str) -> Path:
    if name == "html":
        return write_html(timeline, folder)
    if name == "json":
        # A run writes this file itself, unless it is still running or died.
        if timeline.is_from_event_files:
            _write_timeline(timeline, folder)
        return folder / TIMELINE
    file, as_text = _TEXTS[name]
    write_text(folder / file, as_text(timeline))
    return folder / file


def complete_run(folder: Path, sampler: Sampler | None = None) -> None:
    """At the end of a run: add utilization and idle time, and write all formats that are available here."""
    if not (folder / TIMELINE).is_file() and find_event_files(folder) is None:
        return
    timeline = load_timeline(folder)
    if sampler is not None:
        timeline = replace(timeline, utilization=sampler.utilization(timeline.events))
        _write_timeline(timeline, folder)
    _add_idle(folder / RECORD, timeline)
    export(timeline, folder, ("json", "csv", "perfetto", *(("html",) if has_plotly() else ())))


def _write_timeline(timeline: Timeline, folder: Path) -> None:
    content = {
        "schema_version": SCHEMA_VERSION,
        "origin_s": timeline.origin_s,
        "missing": {str(rank): why for rank, why in timeline.missing.items()},
        "utilization": timeline.utilization,
        "events": timeline.events,
    }
    _write_json(folder / TIMELINE, content)


def _add_idle(path: Path, timeline: Timeline) -> None:
    """Add idle seconds by rank and cause to the record, because reports read records only."""
    if not path.is_file():
        return
    waits, gaps = recorded_s(timeline.events), sampled_s(timeline.utilization, timeline.gaps)
    ranks = range(max((*timeline.devices, *timeline.missing), default=-1) + 1)
    idle = {"waits_s": [waits.get(rank) for rank in ranks], "gaps_s": [gaps.get(rank) for rank in ranks]}
    _write_json(path, {**read_json(path), "idle": idle})


def _write_json(path: Path, content: object) -> None:
    write_text(path, json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n")
