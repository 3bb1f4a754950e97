"""The wiring of a built flow as plain data: nodes, the values they take, inputs, outputs, recurrent states.

Holds no tensor and no module, so it can be compared, hashed and pickled; made by `resolve`, read by `emit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["through", "also", "fork", "split", "merge", "loop", "gate", "switch", "map"]

STATE_MARK = "@"
"""A value written `@h` is what tag `h` was in the forward before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One step of a flow: what it takes from the stream, what else it is fed, and what it makes."""

    name: str
    kind: Kind
    takes: tuple[str, ...]
    uses: tuple[str, ...] = ()
    makes: tuple[str, ...]
    operation: str = ""
    """What a merge does: add, mean, cat or call."""
    dim: int = 1
    function: str = ""
    """The full name of a function of torch that takes the place of a module."""
    is_shared: bool = False
    """One module for every stream, as in a map over the streams of a split."""
    has_skip: bool = False
    note: str = ""
    """A few words for people: ×3, 4 experts, cat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateWire:
    """A tag read before it is made: the value to keep, and the value whose batch the first zeros follow."""

    tag: str
    value: str
    reference: str
    size: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The wiring of one graph."""

    name: str
    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    tags: tuple[tuple[str, str], ...] = ()
    states: tuple[StateWire, ...] = ()
