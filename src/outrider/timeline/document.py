"""A run's timeline as read from its folder: events, utilization, and what its record says.

Decides what a readable timeline is; a folder without one is an error that says what is there. Called by the command
`outrider timeline` and by the end of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from outrider.errors import DataError
from outrider.timeline.files import read_json
from outrider.timeline.idle import Gap, idle_gaps
from outrider.timeline.recorder import SCHEMA_VERSION
from outrider.timeline.spans import Event, Span, spans

TIMELINE, RECORD = "timeline.json", "record.json"


# Without slots: what is derived from the events is kept once it is asked for.
@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What happened in a run."""

    name: str
    events: Sequence[Event]
    utilization: Mapping[str, Any] | None = None
    """None where nothing was sampled: under torchrun, or with `sample_utilization=False`."""
    record: Mapping[str, Any] = field(default_factory=dict)

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
        """Sample times in seconds and utilization in per cent of a rank; empty where it was not sampled."""
        for device in (self.utilization or {}).get("devices", ()):
            if device["rank"] == rank and device["percent"] is not None:
                return (self.utilization or {})["t"], device["percent"]
        return (), ()


def load_timeline(folder: Path) -> Timeline:
    """The timeline in a run's folder."""
    if not folder.is_dir():
        raise DataError(f"no folder {folder}", hint="pass the folder of a run, such as runs/<time>-<policy>")
    path = folder / TIMELINE
    if not path.is_file():
        raise DataError(f"no {TIMELINE} in {folder}", hint=_hint(folder))
    content = read_json(path)
    _check(path, content)
    record = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
    return Timeline(
        name=folder.resolve().name, events=content["events"], utilization=content.get("utilization"), record=record
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
