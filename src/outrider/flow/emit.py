"""Generates code from the wiring of a flow: a torch.fx graph, a Python function, and the module that runs it.

Decides the order of calls and the names in the code. `Wired` holds the parts of a flow, its wiring and its recurrent
states. Called by name resolution and by all modules that read a graph.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from outrider.flow.draft import function_at
from outrider.flow.wiring import STATE_MARK, Node, Size, State, Wiring

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

    plan: Wiring
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


def emit(plan: Wiring) -> fx.Graph:
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
def source_of(plan: Wiring) -> str:
    """The Python text of forward."""
    return str(emit(plan).python_code("self").src).strip() + "\n"


@functools.lru_cache(maxsize=256)
def forward_of(plan: Wiring) -> Callable[..., Any]:
    """Compile the function; its source is registered for tracebacks and debuggers."""
    source, scope = source_of(plan), dict(emit(plan).python_code("self").globals)
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    filename = f"<outrider flow {plan.name} {digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), scope)
    forward: Callable[..., Any] = scope["forward"]
    return forward


class Wired(nn.Module):
    """The parts of a flow, registered under the names of its nodes."""

    def __init__(self, plan: Wiring, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.plan = plan
        self.shapes: dict[str, Any] = {}
        """What each value and each inner module gave in the last shape check; empty before."""
        for name, module in modules.items():
            self.add_module(name, module)
        if plan.states:
            sizes = {wire.tag: None if wire.size is None else Size(wire.size) for wire in plan.states}
            self.states = nn.ModuleDict({tag: State(tag, size) for tag, size in sizes.items()})

    @property
    def code(self) -> str:
        """The Python text of forward, as it runs."""
        return source_of(self.plan)

    @property
    def treats_samples_alone(self) -> bool:
        """No state, and nothing merged along the batch; the parts answer for themselves."""
        return not self.plan.states and all(node.dim != 0 for node in self.plan.nodes)

    def to_fx(self) -> fx.GraphModule:
        """The same modules under a torch.fx graph, for passes that want one."""
        return fx.GraphModule(self, emit(self.plan), class_name="Flow")

    def reset_state(self) -> None:
        """Let every recurrent state, also in nested flows, begin at zeros again."""
        for state in states_in(self):
            state.reset()

    def detach_state(self) -> None:
        """Keep every state but forget how it came about: the end of backpropagation through time."""
        for state in states_in(self):
            state.detach()


def state_of(graph: Wired, tag: str) -> State:
    """The state that holds a tag."""
    state = graph.states[tag]
    assert isinstance(state, State)
    return state


def states_in(module: nn.Module) -> Iterator[State]:
    """Every recurrent state of a module and its parts."""
    return (part for part in module.modules() if isinstance(part, State))
