"""Reads what runs of the suite left behind: their configuration and their record, never the process that made them.

Decides what a readable run is and which folders are runs of the suite. Knows no torch, writes nothing.
Called by the sweep (what is done?), the report, and the comparison with a baseline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.bench.suite.case import Case, Subject, case_from_json, subject_from_json
from outrider.errors import ConfigError, DataError

FINISHED = "finished"
BLOCK = "benchmark"
"""Where the suite keeps its own in `config.json` and `record.json`."""
_AGAIN = "remove its folder and run the sweep again; what is finished is skipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochRow:
    """One epoch as the record has it; None is not known."""

    epoch: int
    samples: int
    seconds: float
    train_s: float
    wall_s: float
    loss: float | None
    eval: float | None
    share_by_rank: tuple[float, ...]
    averages: int
    anchor: int | None
    drift: float | None
    exposed_average_fraction: float | None
    wait_fraction: float | None
    peak_memory_bytes_by_rank: tuple[int | None, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the suite worked out of the timeline when the run had ended."""

    idle_s_by_rank: tuple[Mapping[str, float], ...] = ()
    """Seconds by cause as the ranks recorded them, one mapping per rank."""
    sampled_idle_s_by_rank: tuple[Mapping[str, float], ...] = ()
    """The same by the sampled utilization: below 5 % for half a second or more; empty where nothing was sampled."""
    average_ms: float | None = None
    anchors: tuple[int, ...] = ()
    """The anchor at the first plan, and each it was changed to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteRun:
    """A run of the suite, finished or not."""

    folder: Path
    case: Case
    subject: Subject
    status: str | None
    """As the record says; None where there is no record yet."""
    error: str | None = None
    epochs: tuple[EpochRow, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    commit: str | None = None
    note: str | None = None
    """What a peer says of its setting."""
    went_on: bool = False
    """From a checkpoint of an earlier try."""
    measured: Measured | None = None
    """None where the suite was stopped before it could complete the record."""

    @property
    def is_finished(self) -> bool:
        return self.status == FINISHED and bool(self.epochs)


def read_runs(root: Path) -> list[SuiteRun]:
    """All runs of the suite under a folder, by their place."""
    if not root.is_dir():
        raise ConfigError(
            f"there is no folder {root}", hint="run `outrider bench sweep` first, or pass the folder of its --output"
        )
    found = [read_run(path.parent) for path in sorted(root.rglob("config.json"))]
    return [run for run in found if run is not None]


def read_run(folder: Path) -> SuiteRun | None:
    """The run in this folder; None where it holds no run of the suite."""
    config = read_json(folder / "config.json")
    if config is None or BLOCK not in config:
        return None
    record = read_json(folder / "record.json") or {}
    try:
        return _as_run(folder, config[BLOCK], record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder / 'record.json'} is damaged: {_reason(error)}", hint=_AGAIN) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is no such file."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged: {_reason(error)}", hint=_AGAIN) from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged: no JSON object but {type(content).__name__}", hint=_AGAIN)
    return content


def _as_run(folder: Path, block: Mapping[str, Any], record: Mapping[str, Any]) -> SuiteRun:
    return SuiteRun(
        folder=folder,
        case=case_from_json(block["case"]),
        subject=subject_from_json(block["subject"]),
        status=record.get("status"),
        error=_error(record),
        epochs=tuple(_epoch(fields) for fields in record.get("epochs", ())),
        environment=record.get("environment") or {},
        commit=record.get("commit"),
        note=(record.get("options") or {}).get("note"),
        went_on=bool((record.get("options") or {}).get("resume")),
        measured=_measured(record[BLOCK]["measured"]) if BLOCK in record else None,
    )


def _epoch(fields: Mapping[str, Any]) -> EpochRow:
    return EpochRow(
        epoch=int(fields["epoch"]),
        samples=int(fields["samples"]),
        seconds=float(fields["seconds"]),
        train_s=float(fields["train_s"]),
        wall_s=float(fields["wall_s"]),
        loss=fields["loss"],
        eval=fields["eval"],
        share_by_rank=tuple(fields["share_by_rank"]),
        averages=int(fields["averages"]),
        anchor=fields["anchor"],
        drift=fields["drift"],
        exposed_average_fraction=fields["exposed_average_fraction"],
        wait_fraction=fields["wait_fraction"],
        peak_memory_bytes_by_rank=tuple(fields.get("peak_memory_bytes_by_rank") or ()),
    )


def _measured(fields: Mapping[str, Any]) -> Measured:
    return Measured(
        idle_s_by_rank=tuple(fields.get("idle_s_by_rank") or ()),
        sampled_idle_s_by_rank=tuple(fields.get("sampled_idle_s_by_rank") or ()),
        average_ms=fields.get("average_ms"),
        anchors=tuple(fields.get("anchors") or ()),
    )


def _error(record: Mapping[str, Any]) -> str | None:
    told = record.get("error")
    return told["message"] if told else None


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.lower()} at line {error.lineno}, column {error.colno}"
    return str(error)
