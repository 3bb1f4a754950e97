"""Writes a timeline in the formats that people and tools read.

Decides file names and which formats there are. Called by the command `outrider timeline` and at the end of a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from outrider.errors import ConfigError, nearest
from outrider.timeline.document import RECORD, TIMELINE, Timeline, load_timeline
from outrider.timeline.export_csv import as_csv
from outrider.timeline.export_perfetto import as_trace
from outrider.timeline.files import read_json, write_text
from outrider.timeline.idle import recorded_s, sampled_s
from outrider.timeline.page import has_plotly
from outrider.timeline.sampler import Sampler

FORMATS = ("json", "csv", "html", "perfetto")


def parse_formats(text: str) -> tuple[str, ...]:
    """Names of formats between commas."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in FORMATS:
            close = nearest(name, FORMATS)
            guess = f"did you mean {close}? " if close else ""
            raise ConfigError(f"unknown format {name!r}", hint=f"{guess}formats are {', '.join(FORMATS)}")
    if not names:
        raise ConfigError("no format given", hint=f"formats are {', '.join(FORMATS)}")
    return names


def export(timeline: Timeline, folder: Path, formats: Iterable[str]) -> list[Path]:
    """Write the timeline into the folder in each of the formats; returns the files."""
    return [_WRITERS[name](timeline, folder) for name in formats]


def complete_run(folder: Path, sampler: Sampler | None = None) -> None:
    """At the end of a run: add what was sampled and what it means, and write the formats that can be written here."""
    if not (folder / TIMELINE).is_file():
        return
    if sampler is not None:
        _add_samples(folder / TIMELINE, sampler)
    timeline = load_timeline(folder)
    _add_idle(folder / RECORD, timeline)
    export(timeline, folder, ("csv", "perfetto", "html") if has_plotly() else ("csv", "perfetto"))


def _add_samples(path: Path, sampler: Sampler) -> None:
    content = read_json(path)
    content["utilization"] = sampler.utilization(content["events"])
    _write_json(path, content)


def _add_idle(path: Path, timeline: Timeline) -> None:
    """Reports read records only, so the record gets the sums: by rank and cause, None where nothing was sampled."""
    if not path.is_file():
        return
    waits, gaps = recorded_s(timeline.events), sampled_s(timeline.utilization, timeline.gaps)
    idle = {
        "waits_s": [waits.get(rank) for rank in timeline.devices],
        "gaps_s": [gaps.get(rank) for rank in timeline.devices],
    }
    _write_json(path, {**read_json(path), "idle": idle})


def _write_json(path: Path, content: object) -> None:
    write_text(path, json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n")


def _to_json(timeline: Timeline, folder: Path) -> Path:
    """What the run wrote itself: it was read from there."""
    return folder / TIMELINE


def _to_csv(timeline: Timeline, folder: Path) -> Path:
    write_text(folder / "timeline.csv", as_csv(timeline))
    return folder / "timeline.csv"


def _to_perfetto(timeline: Timeline, folder: Path) -> Path:
    write_text(folder / "trace.json", as_trace(timeline))
    return folder / "trace.json"


def _to_html(timeline: Timeline, folder: Path) -> Path:
    # Only pages need a template engine.
    from outrider.timeline.export_html import write_html

    return write_html(timeline, folder)


_WRITERS: dict[str, Callable[[Timeline, Path], Path]] = {
    "json": _to_json,
    "csv": _to_csv,
    "html": _to_html,
    "perfetto": _to_perfetto,
}
