"""Infers the shape of every value of a graph, and finds mistakes in shapes.

Decides whether merged values have equal shapes, and finds the sizes of recurrent states; runs no real computation.
Called by `Flow.build(example=...)`, by the first forward, and by pictures and summaries that are given an example.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from outrider.flow.draft import FlowError, Mistake
from outrider.flow.emit import JOIN_KEY, NODE_KEY, VALUE_KEY, Join, Wired, emit, state_of
from outrider.flow.specs import UNKNOWN, Spec, describe, evaluate, spec_tree
from outrider.flow.wiring import Size, size_of

_LIKE_STREAM, _NOTHING = "like the stream", "nothing"
_GUESSES, _MAX_GUESSES = (_LIKE_STREAM, _NOTHING), 16
"""Guesses for a state of unknown size: modules such as GRUCell take None for zeros."""


@dataclass(kw_only=True, slots=True)
class Walk:
    """One pass over a graph: the specs found, and the mistakes."""

    graph: Wired
    sizes: Mapping[str, Any]
    guesses: Mapping[str, str]
    specs: dict[str, Any] = field(default_factory=dict)
    """By value of the plan and by path of inner module."""
    mistakes: list[Mistake] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return not self.mistakes and all(spec is not UNKNOWN for spec in self.specs.values())


def learn_shapes(graph: Wired, inputs: Sequence[Any], named: Mapping[str, Any] | None = None) -> None:
    """Check a graph with these inputs and remember the shapes; raises all mistakes at once."""
    walk = trace(graph, _bind(graph, inputs, named or {}))
    if walk.mistakes:
        raise FlowError(graph.plan.name, walk.mistakes)
    for path, part in graph.named_modules():
        if isinstance(part, Wired):
            prefix = f"{path}." if path else ""
            _remember(part, {name.removeprefix(prefix): s for name, s in walk.specs.items() if name.startswith(prefix)})


def _remember(graph: Wired, specs: dict[str, Any]) -> None:
    graph.shapes = specs or graph.shapes
    for wire in graph.plan.states:
        state = state_of(graph, wire.tag)
        if state.size is None and wire.value in specs:
            state.size = size_of(specs[wire.value])


def trace(graph: Wired, inputs: Mapping[str, Any]) -> Walk:
    """Walk a graph on specs; searches sizes of states that the user did not give."""
    sizes = {wire.tag: state_of(graph, wire.tag).size for wire in graph.plan.states}
    unknown = [tag for tag, size in sizes.items() if size is None]
    if not unknown:
        return _walk(graph, inputs, sizes, {})
    failed: list[Walk] = []
    for guesses in itertools.islice(itertools.product(_GUESSES, repeat=len(unknown)), _MAX_GUESSES):
        first = _walk(graph, inputs, sizes, dict(zip(unknown, guesses, strict=True)))
        second = _walk(graph, inputs, _sizes_found(first), {}) if first.is_complete else first
        if second.is_complete and _sizes_found(second) == _sizes_found(first):
            return second
        failed.append(first)
    return _blame(failed, unknown)


def _sizes_found(walk: Walk) -> dict[str, Any]:
    return {wire.tag: size_of(walk.specs[wire.value]) for wire in walk.graph.plan.states}


def _blame(failed: Sequence[Walk], unknown: Sequence[str]) -> Walk:
    """A walk with the mistakes that no guess could avoid, and the states whose size is not found."""
    last = failed[-1]
    certain = [mistake for mistake in last.mistakes if all(mistake in walk.mistakes for walk in failed)]
    last.mistakes = certain + [_unknown_size(tag) for tag in unknown]
    return last


def _unknown_size(tag: str) -> Mistake:
    return Mistake("the size of this state cannot be found", f"give it with .tag({tag!r}, size=(...))", tag)


def _bind(graph: Wired, inputs: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    try:
        bound = inspect.signature(graph.forward).bind(*inputs, **named)
    except TypeError:
        names = ", ".join(graph.plan.inputs)
        count = len(inputs) + len(named)
        mistake = Mistake(f"takes {len(graph.plan.inputs)} inputs ({names}), got {count}", "pass them in this order")
        raise FlowError(graph.plan.name, [mistake]) from None
    return {name: spec_tree(value) for name, value in bound.arguments.items()}


def _walk(graph: Wired, inputs: Mapping[str, Any], sizes: Mapping[str, Any], guesses: Mapping[str, str]) -> Walk:
    walk = Walk(graph=graph, sizes=sizes, guesses=guesses)
    values: dict[fx.Node, Any] = {}
    for node in emit(graph.plan).nodes:
        if node.op == "placeholder":
            values[node] = walk.specs[node.target] = inputs[node.target]
        elif node.op in ("call_module", "call_function"):
            values[node] = _visit(walk, node, values)
            known_as = {str(node.target)} if node.op == "call_module" else set()
            known_as |= {node.meta[VALUE_KEY]} if VALUE_KEY in node.meta else set()
            walk.specs |= dict.fromkeys(known_as, values[node])
    return walk


def _visit(walk: Walk, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    if node.op == "call_module" and str(node.target).startswith("states."):
        return _state_spec(walk, str(node.target).removeprefix("states."), values[node.args[0]])  # type: ignore[index]
    arguments = fx.map_arg(node.args, lambda argument: values[argument])
    if any(leaf is UNKNOWN for leaf in tree_leaves(arguments)):
        return UNKNOWN
    if JOIN_KEY in node.meta and not _is_joinable(walk, node, values):
        return UNKNOWN
    target = walk.graph.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    if isinstance(target, Wired):
        return _visit_nested(walk, str(node.target), target, arguments)
    evaluated = evaluate(target, arguments)  # type: ignore[arg-type]
    if evaluated.fault:
        _report(walk, node, evaluated.fault.message, evaluated.fault.hint)
    if node.op == "call_module":
        walk.specs |= {f"{node.target}.{path}": spec for path, spec in evaluated.inner.items()}
    return evaluated.result


def _visit_nested(walk: Walk, path: str, graph: Wired, arguments: Sequence[Any]) -> Any:
    inner = trace(graph, dict(zip(graph.plan.inputs, arguments, strict=False)))
    walk.mistakes += [mistake.inside(path) for mistake in inner.mistakes]
    walk.specs |= {f"{path}.{name}": spec for name, spec in inner.specs.items()}
    outputs = tuple(inner.specs[name] for name in graph.plan.outputs)
    return outputs if len(outputs) > 1 else outputs[0]


def _state_spec(walk: Walk, tag: str, reference: Any) -> Any:
    first = next((leaf for leaf in tree_leaves(reference) if isinstance(leaf, Spec)), None)
    if first is None:
        return UNKNOWN
    dtype = first.dtype if first.dtype.is_floating_point else torch.get_default_dtype()
    size = walk.sizes[tag]
    if size is not None:
        return _map_size(size, first.shape[0], dtype, first.device)
    return Spec(first.shape, dtype, first.device) if walk.guesses[tag] == _LIKE_STREAM else None


def _map_size(size: Any, batch: int, dtype: torch.dtype, device: torch.device) -> Any:
    if isinstance(size, Size):
        return Spec((batch, *size), dtype, device)
    return tuple(_map_size(branch, batch, dtype, device) for branch in size)


def _is_joinable(walk: Walk, node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Whether the values that meet are alike; broadcasting is not meant by a merge."""
    join: Join = node.meta[JOIN_KEY]
    specs = [values[value] for value in join.values]
    if not all(isinstance(spec, Spec) for spec in specs):
        _report(walk, node, f"cannot merge {describe(specs)}", "merge tensors, or give merge a function")
        return False
    if len({_comparable(spec.shape, join.dim) for spec in specs}) == 1:
        return True
    listed = ", ".join(f"{name} {describe(spec)}" for name, spec in zip(join.names, specs, strict=True))
    kind = next(planned.kind for planned in walk.graph.plan.nodes if planned.name == node.meta[NODE_KEY])
    way_out = "give also() a skip that brings the stream to the shape of the body"
    _report(
        walk, node, f"unlike shapes meet: {listed}", way_out if kind == "also" else "bring the branches to one shape"
    )
    return False


def _comparable(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    """A shape without the size of the dimension that may differ."""
    if dim is None or not -len(shape) <= dim < len(shape):
        return shape
    return tuple(-1 if index == dim % len(shape) else size for index, size in enumerate(shape))


def _report(walk: Walk, node: fx.Node, message: str, hint: str) -> None:
    walk.mistakes.append(Mistake(message, hint, node.meta[NODE_KEY]))
