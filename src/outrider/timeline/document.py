"""A run's timeline as read from its folder: events, utilization, and parts of its record.

Decides how the event files of all ranks become one timeline, ordered by time. Called by the exporters, the summary and
the end of a run.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from outrider.errors import DataError
from outrider.timeline.idle import Gap, idle_gaps
from outrider.timeline.recorder import EVENTS, SCHEMA_VERSION
from outrider.timeline.spans import Event, Span, spans
from outrider.timeline.timeline_files import RECORD, read_json, read_record, write_pieces

# A damaged file may contain gigabytes without a line end.
_HEADER_BYTES = 4096
_NAME = re.compile(r"rank(\d+)\.jsonl")
NO_FILE = "no event file in this folder"


@dataclass(frozen=True, kw_only=True, slots=True)
class EventFiles:
    """The event files of one start of a run."""

    origin_s: float
    """Wall-clock time of the start."""
    paths: Sequence[Path]
    missing: Mapping[int, str] = field(default_factory=dict)
    """Ranks whose events are missing or incomplete, with the reason."""


def find_event_files(folder: Path) -> EventFiles | None:
    """The event files of the latest start; None without any. Files of earlier starts are ignored."""
    headers = {path: header for path in _candidates(folder) if (header := _header(path)) is not None}
    if not headers:
        return None
    latest = max(headers.values(), key=lambda header: float(header["origin_s"]))
    ours = {path: header for path, header in headers.items() if header["origin_s"] == latest["origin_s"]}
    present = {header["rank"] for header in ours.values()}
    missing = {rank: NO_FILE for rank in range(latest["world_size"]) if rank not in present}
    return EventFiles(origin_s=latest["origin_s"], paths=sorted(ours), missing=missing)


def _candidates(folder: Path) -> list[Path]:
    events = folder / EVENTS
    names = events.iterdir() if events.is_dir() else ()
    return [path for path in names if _NAME.fullmatch(path.name) and path.is_file()]


def _header(path: Path) -> dict[str, Any] | None:
    with path.open("rb") as lines:
        header = _decoded(lines.readline(_HEADER_BYTES))
    is_whole = header is not None and {"schema_version", "rank", "world_size", "origin_s"} <= set(header)
    return header if is_whole and header is not None and header["schema_version"] == SCHEMA_VERSION else None


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


@dataclass(frozen=True, slots=True)
class _Line:
    key: tuple[float, int]
    text: bytes


def _lines(path: Path) -> Iterator[_Line]:
    with path.open("rb") as lines:
        next(lines, None)
        for line in lines:
            event = _decoded(line)
            if event is not None and {"t", "rank", "kind"} <= set(event):
                yield _Line((event["t"], event["rank"]), line.rstrip())


def _merged(files: EventFiles) -> Iterator[bytes]:
    return (line.text for line in heapq.merge(*map(_lines, files.paths), key=lambda line: line.key))


def read_events(files: EventFiles) -> list[dict[str, Any]]:
    """All events, ordered by time."""
    return [json.loads(text) for text in _merged(files)]


def write_timeline(path: Path, files: EventFiles, *, utilization: Mapping[str, Any] | None = None) -> None:
    """Merge the files into `timeline.json`, one line at a time."""
    write_pieces(path, _pieces(files, utilization))


def _pieces(files: EventFiles, utilization: Mapping[str, Any] | None) -> Iterator[bytes]:
    head = {
        "schema_version": SCHEMA_VERSION,
        "origin_s": files.origin_s,
        "missing": {str(rank): why for rank, why in files.missing.items()},
        "utilization": utilization,
        "events": [],
    }
    yield json.dumps(head, separators=(",", ":"), allow_nan=False).encode()[:-2]
    for number, text in enumerate(_merged(files)):
        yield text if number == 0 else b"," + text
    yield b"]}\n"


TIMELINE = "timeline.json"


# No slots, because values derived from the events are cached.
@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The timeline of a run."""

    name: str
    events: Sequence[Event]
    utilization: Mapping[str, Any] | None = None
    """None if nothing was sampled: with `sample_utilization=False`, and for `train()` under torchrun."""
    record: Mapping[str, Any] = field(default_factory=dict)
    missing: Mapping[int, str] = field(default_factory=dict)
    """Ranks whose events are missing or incomplete, with the reason."""
    origin_s: float | None = None
    """Wall-clock time of the run's start."""
    is_from_event_files: bool = False
    """Whether events come from the ranks' files, because the run is still running or died without `timeline.json`."""

    @cached_property
    def devices(self) -> dict[int, str]:
        """The device of each rank."""
        ready = {event["rank"]: str(event["device"]) for event in self.events if event["kind"] == "ready"}
        return dict(sorted(ready.items()))

    @cached_property
    def spans(self) -> list[Span]:
        return spans(self.events)

    @cached_property
    def gaps(self) -> list[Gap]:
        return idle_gaps(self.utilization, self.events, self.spans)

    @property
    def end_s(self) -> float:
        return max((float(event["t"]) for event in self.events), default=0.0)

    def of_kind(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["kind"] in kinds]

    def percents(self, rank: int) -> tuple[Sequence[float], Sequence[float | None]]:
        """Sample times in seconds and utilization in percent of a rank; empty if it was not sampled."""
        for device in (self.utilization or {}).get("devices", ()):
            if device["rank"] == rank and device["percent"] is not None:
                return (self.utilization or {})["t"], device["percent"]
        return (), ()


def load_timeline(folder: Path) -> Timeline:
    """Load the timeline from a run's folder."""
    if not folder.is_dir():
        raise DataError(f"no folder {folder}", hint="pass the folder of a run, such as runs/<time>-<policy>")
    path, files = folder / TIMELINE, find_event_files(folder)
    content = _written(path) if path.is_file() else None
    record = read_record(folder) or {}
    # If a resumed run is still running or died, its event files are newer than the last timeline.
    if files is not None and (content is None or content.get("origin_s") != files.origin_s):
        return _from_files(folder, files, record)
    if content is None:
        raise DataError(f"no {TIMELINE} in {folder}", hint=_hint(folder))
    return Timeline(
        name=folder.resolve().name,
        events=content["events"],
        utilization=content.get("utilization"),
        record=record,
        missing={int(rank): why for rank, why in (content.get("missing") or {}).items()},
        origin_s=content.get("origin_s"),
    )


def _written(path: Path) -> dict[str, Any]:
    content = read_json(path)
    _check(path, content)
    return content


def _from_files(folder: Path, files: EventFiles, record: Mapping[str, Any]) -> Timeline:
    return Timeline(
        name=folder.resolve().name,
        events=read_events(files),
        record=record,
        missing=files.missing,
        origin_s=files.origin_s,
        is_from_event_files=True,
    )


def _hint(folder: Path) -> str:
    if (folder / RECORD).is_file():
        status = read_json(folder / RECORD).get("status")
        return f"its record says {status!r}: a run writes its timeline when it ends"
    runs = sorted(path.parent.name for path in folder.glob(f"*/{TIMELINE}"))
    return f"pass one of the runs in it, such as {folder / runs[-1]}" if runs else "pass the folder of a run"


def _check(path: Path, content: Mapping[str, Any]) -> None:
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise DataError(
            f"{path} has schema_version {version}, this outrider reads {SCHEMA_VERSION}",
            hint="read it with the outrider that wrote it",
        )
    events = content.get("events")
    if not isinstance(events, list) or not all(_is_event(event) for event in events):
        raise DataError(f"{path} is damaged: its events are not a list of events", hint="the run has to be made again")


def _is_event(event: Any) -> bool:
    return isinstance(event, dict) and {"t", "rank", "kind"} <= set(event)
