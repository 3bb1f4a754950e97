"""Runs of the suite: what one is, as plain data, and those that finished, read from their folders.

Decides when two runs are the same (by a key computed from the content), and which folders are readable runs of the
suite. Imports no torch, so that reports can read it, and writes nothing. Called by the sweep, which writes cases to
`config.json` and skips finished runs, by the report, and by the comparison with a baseline.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, DataError

SCHEMA_VERSION = 1
_KEY_DIGITS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Everything that determines a run; equal cases are run once."""

    model: str
    mode: str
    seed: int
    epochs: int
    batch_size: int
    devices: tuple[str, ...]
    data_name: str
    max_samples: int | None = None
    """The first so many training samples only; None is all of them."""
    depth: int | None = None
    """Depth of the ResNets if it is not 20; None for the other models."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options of `train()` that the user set."""
    is_timed: bool = True
    """Whether it runs alone on the machine; runs that share the machine do not show speed."""

    @property
    def key(self) -> str:
        """A hash of the content."""
        text = json.dumps(_content(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:_KEY_DIGITS]

    @property
    def title(self) -> str:
        """The model as people call it: resnet20 of depth 32 is resnet32."""
        return self.model if self.depth is None else self.model.replace("20", str(self.depth))

    @property
    def folder(self) -> Path:
        """Where it lies under the output folder."""
        return Path(self.title) / self.mode / f"seed-{self.seed}-{self.key}"

    @property
    def condition(self) -> tuple[Any, ...]:
        """The settings that must be equal for modes and seeds of a model in one table, timed or not."""
        seen = (self.epochs, self.batch_size, self.devices, self.data_name)
        return (self.title, *seen, json.dumps(dict(self.settings), sort_keys=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Facts about the task, for reports that do not load it."""

    metric: str
    larger_is_better: bool
    is_stand_in: bool
    target: float | None
    published: float | None = None
    """The published figure; never compared with a stand-in."""


def as_block(case: Case, subject: Subject) -> dict[str, Any]:
    """The content of `benchmark` in `config.json`."""
    return {"schema_version": SCHEMA_VERSION, "key": case.key, "case": _content(case), "subject": asdict(subject)}


def _content(case: Case) -> dict[str, Any]:
    """A case as plain data; timed cases omit `is_timed`, so that their keys equal those of older runs."""
    content = asdict(case)
    if case.is_timed:
        del content["is_timed"]
    return content


def case_from_json(content: Mapping[str, Any]) -> Case:
    return Case(**_known(Case, content) | {"devices": tuple(content["devices"])})


def subject_from_json(content: Mapping[str, Any]) -> Subject:
    return Subject(**_known(Subject, content))


def _known(kind: type[Case | Subject], content: Mapping[str, Any]) -> dict[str, Any]:
    """What this version knows of a block; a newer one may have written more."""
    return {one.name: content[one.name] for one in fields(kind) if one.name in content}


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
    wall_s: float | None
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
class SuiteMeasurement:
    """Numbers that the suite computed from the timeline at the end of the run."""

    idle_s_by_rank: tuple[Mapping[str, float], ...] = ()
    """Seconds by cause as the ranks recorded them, one mapping per rank."""
    sampled_idle_s_by_rank: tuple[Mapping[str, float], ...] = ()
    """The same by the sampled utilization: below 5 % for half a second or more; empty if nothing was sampled."""
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
    """As the record says; None if there is no record yet."""
    error: str | None = None
    epochs: tuple[EpochRow, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    commit: str | None = None
    note: str | None = None
    """A peer's description of its settings."""
    went_on: bool = False
    """From a checkpoint of an earlier try."""
    measured: SuiteMeasurement | None = None
    """None if the suite was stopped before it could complete the record."""

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
    """The run in this folder; None if it holds no run of the suite."""
    config = read_json(folder / "config.json")
    if config is None or BLOCK not in config:
        return None
    record = read_json(folder / "record.json") or {}
    try:
        return _as_run(folder, config[BLOCK], record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder / 'record.json'} is damaged: {_reason(error)}", hint=_AGAIN) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if there is no such file."""
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
        wall_s=fields["wall_s"],
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


def _measured(fields: Mapping[str, Any]) -> SuiteMeasurement:
    return SuiteMeasurement(
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
