"""The wiring of a built flow as plain data: nodes, the values they take, inputs, outputs, recurrent states.

Decides what recurrent state is: the value of a tag in the previous forward pass, initially zeros. Values may be tensors
inside tuples, lists and dicts. Created by name resolution, read by the generated code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from outrider.errors import ConfigError

Kind = Literal["through", "also", "fork", "split", "merge", "loop", "gate", "switch", "map"]

STATE_MARK = "@"
"""A value written `@h` is what tag `h` was in the forward before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One step of a flow: its inputs from the stream, its further inputs, and its outputs."""

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
class Wiring:
    """The wiring of one graph."""

    name: str
    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    tags: tuple[tuple[str, str], ...] = ()
    states: tuple[StateWire, ...] = ()


class State(nn.Module):
    """Holds one recurrent value; `size` is its shape without the batch, None until it is given or found."""

    def __init__(self, tag: str, size: Any) -> None:
        super().__init__()
        self.tag = tag
        self.size = size
        self.value: Any = None

    def forward(self, reference: Any) -> Any:
        """The kept value, or zeros for the batch of `reference`."""
        return recall(self, reference)

    def keep(self, value: Any) -> Any:
        """Hold a value for the next forward."""
        return remember(self, value)

    def reset(self) -> None:
        self.value = None

    def detach(self) -> None:
        self.value = _detached(self.value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> State:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.value = tree_map(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, self.value)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Tensors with a history can be neither copied nor pickled.
        return {**self.__dict__, "value": _detached(self.value)}

    def extra_repr(self) -> str:
        return f"tag={self.tag!r}, size={self.size}"


class Size(tuple[int, ...]):
    """The shape of one tensor of a state, without the batch; a leaf, unlike a plain tuple of sizes."""


def size_of(value: Any) -> Any:
    """The sizes of the tensors, or of anything with a shape, in a value."""
    return _map_sizes(lambda leaf: Size(leaf.shape[1:]), value)


def zeros_for(size: Any, reference: Any) -> Any:
    """Zeros of a size for the batch, device and floating type of a reference."""
    first = _first_tensor(reference)
    dtype = first.dtype if first.dtype.is_floating_point else torch.get_default_dtype()
    return _map_sizes(lambda leaf: torch.zeros(first.shape[0], *leaf, dtype=dtype, device=first.device), size)


def recall(state: State, reference: Any) -> Any:
    """The kept value; zeros if there is none, or if the batch has another size."""
    if _is_exporting():
        return zeros_for(_known_size(state), reference)
    first = _first_tensor(reference)
    if state.value is None or _first_tensor(state.value).shape[0] != first.shape[0]:
        return zeros_for(_known_size(state), reference)
    return state.value


def remember(state: State, value: Any) -> Any:
    """Keep a value; an exported program has no state to keep."""
    if not _is_exporting():
        state.value = value
    return value


# Branching on tensors would stop torch.fx.symbolic_trace; wrapped functions are taken whole.
fx.wrap("recall")
fx.wrap("remember")


def _is_exporting() -> bool:
    # Up to torch 2.11 is_exporting() is also true while dynamo compiles.
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def _known_size(state: State) -> Any:
    if state.size is None:
        raise ConfigError(
            f"the size of state {state.tag!r} is not known",
            hint=f"give it with .tag({state.tag!r}, size=(...)), build(example=...), or run the graph once uncompiled",
        )
    return state.size


def _map_sizes(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, Size):
        return change(tree)
    if isinstance(tree, list | tuple):
        return tuple(_map_sizes(change, branch) for branch in tree)
    return change(tree)


def _first_tensor(value: Any) -> Tensor:
    found = next((leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), None)
    if found is None:
        raise ConfigError("a recurrent state needs a tensor in the stream, got none", hint="feed the graph tensors")
    return found


def _detached(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)
