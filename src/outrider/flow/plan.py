"""The wiring of a built flow as plain data: nodes, the values they take, inputs, outputs, recurrent states.

Holds no tensor and no module, so it can be compared, hashed and pickled; made by `resolve`, read by `emit`.
"""

from __future__ import annotations

from collections.abc import Iterator
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

    @property
    def body(self) -> str:
        """The path of the module that does the work."""
        return f"{self.name}.body" if self.kind == "also" else self.name


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

    def edges(self) -> Iterator[tuple[str, str]]:
        """(value, name of the node that takes it), states included as `@tag`."""
        for node in self.nodes:
            for value in (*node.takes, *node.uses):
                yield value, node.name

    def maker_of(self, value: str) -> str | None:
        """The node that makes a value; None where it is an input or a state."""
        return next((node.name for node in self.nodes if value in node.makes), None)
