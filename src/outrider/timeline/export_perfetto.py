"""A timeline as Chrome trace events, which Perfetto and chrome://tracing open.

Decides the lanes: one process per rank with a thread each for windows, averages and waits, and one for the decisions
of the whole world. Times are microseconds since the start of the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from outrider.timeline.document import Timeline
from outrider.timeline.spans import LANES, Span

WORLD = 0
"""The process of what concerns all ranks; rank r is process r + 1."""
_IDLE = len(LANES)
_MARKS = ("anchor", "guard", "split", "alone", "compensation", "checkpoint", "resume")


def as_trace(timeline: Timeline) -> str:
    """The JSON object form of the trace event format."""
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
    return _slice(span.rank, LANES.index(span.lane), name, span.start_s, span.end_s, dict(span.facts))


def _slice(
    rank: int, thread: int, name: str, start_s: float, end_s: float, args: dict[str, Any], *, category: str = "rank"
) -> dict[str, Any]:
    start_us = _us(start_s)
    where = {"pid": rank + 1, "tid": thread, "ts": start_us, "dur": max(0, _us(end_s) - start_us)}
    return {"ph": "X", "name": name, "cat": category, **where, "args": _finite(args)}


def _epochs(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Epochs as rank 0 saw them, with what they came to."""
    mine = [event for event in timeline.of_kind("epoch start", "epoch end") if event["rank"] == 0]
    started_s: dict[int, float] = {}
    for event in mine:
        if event["kind"] == "epoch start":
            started_s[event["epoch"]] = event["t"]
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
    """Without what JSON cannot hold."""
    return {name: value for name, value in args.items() if not (isinstance(value, float) and value - value != 0)}
