"""A flow as the user wrote it, and its mistakes: all at once, each with its node.

Holds the user's calls, valid or not; name resolution and shape inference check them, `Flow.build` raises the error.
Functions of torch are known by name, so that the emitted code calls them without a module around them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional
from torch import nn

from outrider.errors import ConfigError
from outrider.flow.wiring import Kind


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that is wrong, the way out, and the node it is wrong at."""

    message: str
    hint: str
    node: str = ""
    """Empty for the flow as a whole, and before the node has a name."""

    def __str__(self) -> str:
        return f"{self.node or 'the flow'}: {self.message} ({self.hint})"

    def inside(self, outer: str) -> Mistake:
        """The same mistake, seen from the flow that holds this one."""
        return replace(self, node=f"{outer}.{self.node}" if self.node else outer)


class FlowError(ConfigError):
    """A flow that cannot be built or run; `mistakes` holds each of its faults."""

    def __init__(self, flow: str, mistakes: Sequence[Mistake]) -> None:
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__("\n".join([f"flow {flow!r} has {count}", *(f"  {mistake}" for mistake in mistakes)]))
        self.flow = flow
        self.mistakes = tuple(mistakes)

    def __reduce__(self) -> tuple[type[FlowError], tuple[str, tuple[Mistake, ...]]]:
        return FlowError, (self.flow, self.mistakes)


Make = Callable[[Mapping[str, Any]], nn.Module]
"""Makes the module of a node from its parts, once nested flows among them are built."""


@dataclass(frozen=True, slots=True)
class Point:
    """One stream: an output of a draft, or an input of the flow if draft is None."""

    draft: int | None
    output: int = 0


@dataclass(kw_only=True, slots=True)
class Draft:
    """One node as written: its parts by name, its input streams, and its tags and labels."""

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
    unfinished: Mistake | None = None
    """Set while a loop or a map has not been told its range."""
    faults: list[Mistake] = field(default_factory=list)

    def fault(self, message: str, *, hint: str) -> None:
        self.faults.append(Mistake(message, hint))


@dataclass(kw_only=True, slots=True)
class FlowDraft:
    """A whole flow as written."""

    inputs: list[str]
    streams: tuple[Point, ...] = (Point(None),)
    """The open ends, from which the next node continues."""
    drafts: list[Draft] = field(default_factory=list)
    input_tags: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    faults: list[Mistake] = field(default_factory=list)

    @property
    def last(self) -> Draft | None:
        return self.drafts[-1] if self.drafts else None

    def add(self, draft: Draft) -> None:
        self.drafts.append(draft)
        self.leave_open(draft)

    def leave_open(self, draft: Draft) -> None:
        """Let the stream go on from the draft added last."""
        self.streams = tuple(Point(len(self.drafts) - 1, index) for index in range(draft.num_outputs))


_HOMES = {"torch": torch, "torch.nn.functional": torch.nn.functional}


def name_of(function: Any) -> str:
    """The full name of a function of torch, such as torch.relu; empty for anything else."""
    short = getattr(function, "__name__", "")
    if not short:
        return ""
    return next((f"{home}.{short}" for home, held in _HOMES.items() if getattr(held, short, None) is function), "")


def function_at(name: str) -> Callable[..., Any]:
    """The function of a full name."""
    home, _, short = name.rpartition(".")
    function: Callable[..., Any] = getattr(_HOMES[home], short)
    return function
