"""A node of a flow while it is being written down: still without a final name, still open to tags.

Holds what the user said, right or wrong; `resolve` judges it. Written by `Flow`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from outrider.flow.plan import Kind

Make = Callable[[Mapping[str, Any]], nn.Module]
"""Makes the module of a node from its parts, once nested flows among them are built."""


@dataclass(frozen=True, slots=True)
class Point:
    """One stream: an output of a draft, or an input of the flow where draft is None."""

    draft: int | None
    output: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """Something known to be wrong, before its node has a name."""

    message: str
    hint: str


@dataclass(kw_only=True, slots=True)
class Draft:
    """One node as written: its parts by name, the streams it takes and what was said about it since."""

    kind: Kind
    takes: tuple[Point, ...]
    parts: dict[str, Any] = field(default_factory=dict)
    make: Make | None = None
    num_outputs: int = 1
    uses: list[str] = field(default_factory=list)
    over: str | None = None
    """The tag whose tensor a map takes instead of the stream."""
    tags: list[str] = field(default_factory=list)
    label: str | None = None
    operation: str = ""
    dim: int = 1
    is_shared: bool = False
    note: str = ""
    unfinished: Fault | None = None
    """Set while a loop or a map has not been told its range."""
    faults: list[Fault] = field(default_factory=list)

    def fault(self, message: str, *, hint: str) -> None:
        self.faults.append(Fault(message, hint))


@dataclass(kw_only=True, slots=True)
class Script:
    """A whole flow as written."""

    inputs: list[str]
    streams: tuple[Point, ...] = (Point(None),)
    """The open ends: where the next node goes on."""
    drafts: list[Draft] = field(default_factory=list)
    input_tags: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    @property
    def last(self) -> Draft | None:
        return self.drafts[-1] if self.drafts else None

    def add(self, draft: Draft) -> None:
        self.drafts.append(draft)
        self.leave_open(draft)

    def leave_open(self, draft: Draft) -> None:
        """Let the stream go on from the draft added last."""
        self.streams = tuple(Point(len(self.drafts) - 1, index) for index in range(draft.num_outputs))
