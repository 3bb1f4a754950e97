"""A graph as boxes and arrows, without coordinates and style.

Decides what is drawn: a residual is a box and a join, a split a box for each branch. Read by `layout`, `svg`, `text`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from outrider.flow.blocks import Call, ConditionalRepeat, Repeat
from outrider.flow.emit import Wired
from outrider.flow.profile import Profile
from outrider.flow.specs import describe
from outrider.flow.wiring import STATE_MARK, Node


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Something to draw: an end (input, output), a join, or a module."""

    name: str
    kind: str
    """input, output, join, or the kind of the node."""
    lines: tuple[str, ...]
    node: str = ""
    """The node it belongs to; empty for inputs and outputs."""
    heat: float | None = None
    """The share of the time relative to the hottest node, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """A value between two boxes; a state points backwards, to the next forward."""

    source: str
    target: str
    state: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagram:
    """All there is to draw."""

    title: str
    subtitle: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def diagram_of(graph: Wired, profile: Profile | None = None) -> Diagram:
    """The boxes and arrows of a graph, with the times of a profile if one is given."""
    plan = graph.plan
    boxes = [Box(name=name, kind="input", lines=_lines(name, _shape(graph, name))) for name in plan.inputs]
    for node in plan.nodes:
        boxes += _boxes(graph, node, profile)
    boxes += [
        Box(name=f"output {value}", kind="output", lines=_lines("output", _tag(graph, value))) for value in plan.outputs
    ]
    count = sum(parameter.numel() for parameter in graph.parameters())
    time = "" if profile is None else f" · {profile.total_ms:.2f} ms forward and backward"
    return Diagram(
        title=plan.name, subtitle=f"{count:,} parameters{time}", boxes=tuple(boxes), arrows=tuple(_arrows(graph))
    )


def _boxes(graph: Wired, node: Node, profile: Profile | None) -> Iterator[Box]:
    module = getattr(graph, node.name, None)
    if node.kind == "merge":
        heat = _heat(profile, node.name)
        yield Box(name=node.name, kind="join", lines=(_join_word(node, module),), node=node.name, heat=heat)
    elif node.kind == "also" and isinstance(module, nn.ModuleDict):
        yield from _residual_boxes(graph, node, module, profile)
    else:
        parts = (
            list(module) if node.kind == "split" and isinstance(module, nn.ModuleList) else [module] * len(node.makes)
        )
        for value, part in zip(node.makes, parts, strict=True):
            lines = _lines(value, _what(node, part), _shape(graph, value), _time(profile, value))
            yield Box(name=value, kind=node.kind, lines=lines, node=node.name, heat=_heat(profile, value))


def _residual_boxes(graph: Wired, node: Node, parts: nn.ModuleDict, profile: Profile | None) -> Iterator[Box]:
    """The body, the skip if there is one, and the join; the time is that of all three."""
    heat = _heat(profile, node.name)
    lines = _lines(node.name, _what(node, parts["body"]), _shape(graph, f"{node.name}.body"), _time(profile, node.name))
    yield Box(name=f"{node.name}.body", kind="also", lines=lines, node=node.name, heat=heat)
    if node.has_skip:
        skip_lines = _lines("skip", _what(node, parts["skip"]), _shape(graph, f"{node.name}.skip"))
        yield Box(name=f"{node.name}.skip", kind="also", lines=skip_lines, node=node.name, heat=heat)
    yield Box(name=node.name, kind="join", lines=("add",), node=node.name)


def _arrows(graph: Wired) -> Iterator[Arrow]:
    states = {STATE_MARK + wire.tag: wire for wire in graph.plan.states}
    for node in graph.plan.nodes:
        for value, target in _deliveries(node):
            if value in states:
                yield Arrow(states[value].value, target, state=states[value].tag)
            else:
                yield Arrow(value, target)
        if node.kind == "also":
            yield Arrow(f"{node.name}.body", node.name)
            yield Arrow(f"{node.name}.skip" if node.has_skip else node.takes[0], node.name)
    for value in graph.plan.outputs:
        yield Arrow(value, f"output {value}")


def _deliveries(node: Node) -> Iterator[tuple[str, str]]:
    """(value, box it goes to)"""
    if node.kind == "also":
        yield from ((value, f"{node.name}.body") for value in (*node.takes, *node.uses))
        if node.has_skip:
            yield node.takes[0], f"{node.name}.skip"
    elif node.kind == "split":
        yield from ((value, made) for made in node.makes for value in (*node.takes, *node.uses))
    elif node.is_shared:
        yield from zip(node.takes, node.makes, strict=True)
        yield from ((value, made) for made in node.makes for value in node.uses)
    else:
        yield from ((value, node.name) for value in (*node.takes, *node.uses))


def _what(node: Node, module: Any) -> str:
    """The class of the module, or the node's note if it says more, and the number of parameters."""
    if isinstance(module, Repeat | ConditionalRepeat):
        text = f"loop {node.note}: {class_of(module.body)}"
    elif node.kind in ("gate", "switch", "map"):
        text = f"{node.kind}: {node.note}"
    else:
        text = short_name(node.function) or class_of(module)
    return ", ".join(_lines(text, _count(module)))


def short_name(function: str) -> str:
    return function.rpartition(".")[2]


def class_of(module: Any) -> str:
    """The class of a module as people know it."""
    if isinstance(module, Wired):
        return f"Flow of {len(module.plan.nodes)}"
    return module.extra_repr() if isinstance(module, Call) else type(module).__name__


def _join_word(node: Node, module: Any) -> str:
    if node.operation != "call":
        return node.operation
    return short_name(node.function) or class_of(module)


def _lines(*texts: str) -> tuple[str, ...]:
    return tuple(text for text in texts if text)


def _count(module: Any) -> str:
    count = sum(parameter.numel() for parameter in module.parameters()) if isinstance(module, nn.Module) else 0
    return f"{count:,} parameters" if count else ""


def _tag(graph: Wired, value: str) -> str:
    return next((tag for tag, tagged in graph.plan.tags if tagged == value), "")


def _shape(graph: Wired, value: str) -> str:
    spec = graph.shapes.get(value)
    return "" if spec is None else describe(spec)


def _heat(profile: Profile | None, node: str) -> float | None:
    if profile is None:
        return None
    hottest = max((profile.share(each.node) for each in profile.nodes), default=0.0)
    return profile.share(node) / hottest if hottest else 0.0


def _time(profile: Profile | None, node: str) -> str:
    if profile is None:
        return ""
    return f"{profile.share(node) * profile.total_ms:.2f} ms · {profile.share(node):.0%}"
