"""One run of the suite as plain data: what is trained, in which mode, with which seed, and what is known of the task.

Decides what makes two runs the same: the key, from the content alone. Knows no torch, so that reports can read it.
Made by the sweep, written to `config.json`, read back by the report, the comparison and `rerun`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
_KEY_DIGITS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Everything that decides what a run does; two equal cases need to be run once."""

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
    """Of the ResNets, where it is not 20; None for the other models."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options of the core that were set by hand."""
    is_timed: bool = True
    """Whether it has the machine to itself: what runs beside others says nothing about speed."""

    @property
    def key(self) -> str:
        """The same for the same content, whoever asks and whenever."""
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
        """What must be equal for the modes and seeds of a model to stand in one table, timed or not."""
        seen = (self.epochs, self.batch_size, self.devices, self.data_name)
        return (self.title, *seen, json.dumps(dict(self.settings), sort_keys=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is known of the task, for those who only read about it."""

    metric: str
    larger_is_better: bool
    is_stand_in: bool
    target: float | None
    published: float | None = None
    """What others report; never held against a stand-in."""


def as_block(case: Case, subject: Subject) -> dict[str, Any]:
    """What stands under `benchmark` in `config.json`."""
    return {"schema_version": SCHEMA_VERSION, "key": case.key, "case": _content(case), "subject": asdict(subject)}


def _content(case: Case) -> dict[str, Any]:
    """A case as plain data; a timed one as it was before there were others, so that its key is what it was."""
    content = asdict(case)
    if case.is_timed:
        del content["is_timed"]
    return content


def case_from_json(content: Mapping[str, Any]) -> Case:
    known = {one.name for one in fields(Case)}
    return Case(**{name: value for name, value in content.items() if name in known} | _tuples(content))


def _tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    return {"devices": tuple(content["devices"])}


def subject_from_json(content: Mapping[str, Any]) -> Subject:
    known = {one.name for one in fields(Subject)}
    return Subject(**{name: value for name, value in content.items() if name in known})
