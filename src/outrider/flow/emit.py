"""From the plan of a flow to code: a torch.fx graph, and the Python function written from it.

Decides the order of calls; nothing of the plan is looked at when the function runs. Called when a graph is made.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from outrider.flow.functions import function_at
from outrider.flow.plan import STATE_MARK, Node, Plan

NODE_KEY = "flow_node"
"""In the meta of an fx node: the name of the flow's node it belongs to."""
VALUE_KEY = "flow_value"
"""In the meta of an fx node: the name of the plan's value it is."""
JOIN_KEY = "flow_join"
"""In the meta of the first operation of a merge: the Join it begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """Values that a merge or a residual brings together, and so must be alike."""

    values: tuple[fx.Node, ...]
    names: tuple[str, ...]
    dim: int | None
    """The dimension that may differ, for cat."""


@dataclass(kw_only=True, slots=True)
class Emission:
    """The fx graph so far, and where in it each value of the plan is."""

    plan: Plan
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[str, fx.Node] = field(default_factory=dict)

    def call(self, node: Node, path: str, takes: tuple[str, ...], uses: tuple[str, ...] = ()) -> fx.Node:
        arguments = tuple(self.value(name) for name in (*takes, *uses))
        return self.mark(node, self.graph.call_module(path, arguments))

    def value(self, name: str) -> fx.Node:
        if name not in self.values:
            wire = next(wire for wire in self.plan.states if STATE_MARK + wire.tag == name)
            self.values[name] = self.graph.call_module(f"states.{wire.tag}", (self.values[wire.reference],))
        return self.values[name]

    @staticmethod
    def mark(node: Node, made: fx.Node) -> fx.Node:
        made.meta[NODE_KEY] = node.name
        return made


def emit(plan: Plan) -> fx.Graph:
    """The calls of a plan, in order, as a torch.fx graph."""
    emission = Emission(plan=plan)
    emission.values |= {name: emission.graph.placeholder(name) for name in plan.inputs}
    for node in plan.nodes:
        for name, made in zip(node.makes, _emit_node(emission, node), strict=True):
            emission.values[name] = made
            made.meta[VALUE_KEY] = name
    for wire in plan.states:
        state = emission.graph.get_attr(f"states.{wire.tag}")
        emission.graph.call_method("keep", (state, emission.values[wire.value]))
    outputs = tuple(emission.values[name] for name in plan.outputs)
    emission.graph.output(outputs if len(outputs) > 1 else outputs[0])
    return emission.graph


def _emit_node(emission: Emission, node: Node) -> list[fx.Node]:
    if node.function:
        arguments = tuple(emission.value(name) for name in (*node.takes, *node.uses))
        return [emission.mark(node, emission.graph.call_function(function_at(node.function), arguments))]
    if node.kind == "also":
        return [_emit_also(emission, node)]
    if node.kind == "merge" and node.operation != "call":
        return [_emit_merge(emission, node)]
    if node.kind == "split":
        paths = [f"{node.name}.{index}" for index in range(len(node.makes))]
        return [emission.call(node, path, node.takes, node.uses) for path in paths]
    if node.is_shared:
        return [emission.call(node, node.name, (stream,), node.uses) for stream in node.takes]
    return [emission.call(node, node.name, node.takes, node.uses)]


def _emit_also(emission: Emission, node: Node) -> fx.Node:
    body = emission.call(node, f"{node.name}.body", node.takes, node.uses)
    if node.has_skip:
        kept, kept_name = emission.call(node, f"{node.name}.skip", node.takes), "the skip"
    else:
        kept, kept_name = emission.values[node.takes[0]], "the stream"
    total = emission.mark(node, emission.graph.call_function(operator.add, (kept, body)))
    total.meta[JOIN_KEY] = Join(values=(kept, body), names=(kept_name, "the body"), dim=None)
    return total


def _emit_merge(emission: Emission, node: Node) -> fx.Node:
    names = (*node.takes, *node.uses)
    streams = tuple(emission.value(name) for name in names)
    if node.operation == "cat":
        merged = emission.graph.call_function(torch.cat, (list(streams), node.dim))
        merged.meta[JOIN_KEY] = Join(values=streams, names=names, dim=node.dim)
        return emission.mark(node, merged)
    total = emission.mark(node, emission.graph.call_function(operator.add, streams[:2]))
    total.meta[JOIN_KEY] = Join(values=streams, names=names, dim=None)
    for stream in streams[2:]:
        total = emission.mark(node, emission.graph.call_function(operator.add, (total, stream)))
    if node.operation == "mean":
        total = emission.mark(node, emission.graph.call_function(operator.truediv, (total, len(streams))))
    return total


@functools.lru_cache(maxsize=256)
def source_of(plan: Plan) -> str:
    """The Python text of forward."""
    return str(emit(plan).python_code("self").src).strip() + "\n"


@functools.lru_cache(maxsize=256)
def forward_of(plan: Plan) -> Callable[..., Any]:
    """The function itself; its text is left where tracebacks and debuggers look for it."""
    source, scope = source_of(plan), dict(emit(plan).python_code("self").globals)
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    filename = f"<outrider flow {plan.name} {digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), scope)
    forward: Callable[..., Any] = scope["forward"]
    return forward
