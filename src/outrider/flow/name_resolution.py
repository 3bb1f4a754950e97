"""Turns a draft into a graph: names every node, resolves every tag, and finds all mistakes.

Decides names: a label, otherwise the first tag, otherwise the kind and a number; parameters are named accordingly.
Called by `Flow.build`.
"""

from __future__ import annotations

import keyword
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from outrider.errors import did_you_mean
from outrider.flow.blocks import Call, function_name
from outrider.flow.draft import Draft, FlowDraft, Mistake, Point, name_of
from outrider.flow.graph import Graph
from outrider.flow.specs import fault_of_calls
from outrider.flow.wiring import STATE_MARK, Node, StateWire, Wiring

_ATTRIBUTES = frozenset({"states", "plan", "shapes", "training", "self"})
"""What a graph holds besides its nodes."""


def names_of(script: FlowDraft) -> list[str]:
    """The name of every draft, in order; generated names avoid those that were given."""
    given = {name for draft in script.drafts for name in (draft.label, *draft.tags) if name} | set(script.inputs)
    counts: dict[str, int] = {}
    return [_given_name(draft) or _next_name(_stem(draft), counts, given) for draft in script.drafts]


def fault_of_name(name: str, graph_class: type[nn.Module]) -> Mistake | None:
    """Why a name cannot be given to a point of a graph."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        return Mistake("is not a name", "use letters, digits and underscores, beginning with a letter")
    if hasattr(graph_class, name) or name in _ATTRIBUTES:
        return Mistake("is the name of something every graph has", f"choose another, such as {name + '_1'!r}")
    return None


def _given_name(draft: Draft) -> str | None:
    return draft.label or (str(draft.tags[0]) if draft.tags else None)


def _next_name(stem: str, counts: dict[str, int], taken: set[str]) -> str:
    while True:
        counts[stem] = counts.get(stem, 0) + 1
        name = f"{stem}_{counts[stem]}"
        if name not in taken:
            return name


def _stem(draft: Draft) -> str:
    """The kind of node; for a plain module, its class."""
    if draft.kind not in ("through", "fork"):
        return draft.kind
    module = draft.parts[""]
    if isinstance(module, FlowDraft):
        return "flow"
    name = type(module).__name__ if isinstance(module, nn.Module) else function_name(module)
    return name.lower() if name.isidentifier() else "call"


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A graph, or why there is none."""

    graph: Graph | None
    mistakes: tuple[Mistake, ...]


@dataclass(kw_only=True, slots=True)
class ResolvedFlow:
    """What is known so far about one flow."""

    script: FlowDraft
    names: list[str]
    open_scripts: tuple[int, ...]
    """The flows this one is nested in, itself included: meeting one of them again is a cycle."""
    built_before: dict[int, Built]
    """Flows met before: used twice, they are one module with one set of parameters."""
    tags: dict[str, int | None] = field(default_factory=dict)
    """The draft that a tag names, None for an input."""
    modules: dict[str, nn.Module] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def report(self, node: str, message: str, hint: str) -> None:
        self.mistakes.append(Mistake(message, hint, node))

    def value(self, point: Point) -> str:
        if point.draft is None:
            return self.script.inputs[0]
        return self.makes(point.draft)[point.output]

    def makes(self, index: int) -> tuple[str, ...]:
        count = self.script.drafts[index].num_outputs
        name = self.names[index]
        return (name,) if count == 1 else tuple(f"{name}.{output}" for output in range(count))


def resolve(
    script: FlowDraft,
    name: str,
    *,
    open_scripts: tuple[int, ...] = (),
    built_before: dict[int, Built] | None = None,
) -> Built:
    """The graph of a flow, or all its mistakes."""
    known = ResolvedFlow(
        script=script,
        names=names_of(script),
        open_scripts=(*open_scripts, id(script)),
        built_before={} if built_before is None else built_before,
    )
    known.mistakes += script.faults
    _learn_tags(known)
    nodes = tuple(_resolve_node(known, index) for index in range(len(script.drafts)))
    _check_ends(known, nodes)
    if known.mistakes:
        return Built(graph=None, mistakes=tuple(known.mistakes))
    return Built(graph=Graph.of(_plan(known, name, nodes), known.modules), mistakes=())


def _learn_tags(known: ResolvedFlow) -> None:
    """Enter inputs and tags by name; every name may be given once."""
    for name in (*known.script.inputs, *known.script.input_tags):
        _enter(known, name, None, at="", noun="input")
    for index, draft in enumerate(known.script.drafts):
        for tag in draft.tags:
            _enter(known, tag, index, at=known.names[index], noun="tag")
    _check_labels(known)


def _enter(known: ResolvedFlow, name: str, index: int | None, *, at: str, noun: str) -> None:
    if fault := fault_of_name(name, Graph):
        known.report(at, f"{noun} {name!r} {fault.message}", fault.hint)
    if name in known.tags:
        holder = known.tags[name]
        owner = "an input" if holder is None else f"node {holder + 1}"
        known.report(at, f"duplicate {noun} {name!r}, already given to {owner}", "give every point its own name")
        return
    known.tags[name] = index


def _check_labels(known: ResolvedFlow) -> None:
    seen: dict[str, int] = {}
    for index, draft in enumerate(known.script.drafts):
        if draft.label is None:
            continue
        if fault := fault_of_name(draft.label, Graph):
            known.report(known.names[index], f"label {draft.label!r} {fault.message}", fault.hint)
        if draft.label in seen or known.tags.get(draft.label, index) != index:
            known.report(
                known.names[index], f"duplicate label {draft.label!r}, already taken", "give every node its own name"
            )
        seen[draft.label] = index


def _resolve_node(known: ResolvedFlow, index: int) -> Node:
    draft, name = known.script.drafts[index], known.names[index]
    faults = [*([draft.unfinished] if draft.unfinished else []), *draft.faults]
    known.mistakes += [replace(fault, node=name) for fault in faults]
    uses = tuple(value for tag in draft.uses if (value := _follow(known, index, tag)) is not None)
    takes = tuple(known.value(point) for point in draft.takes)
    if draft.over is not None:
        takes = _follow_over(known, index, draft.over) or takes
    if draft.kind == "merge" and len(takes) + len(draft.uses) < 2:
        known.report(name, "a merge needs at least 2 streams, got 1", "split first, or add tags with using(...)")
    _build_module(known, index)
    function = name_of(draft.parts.get(""))
    if function:
        known.modules.pop(name, None)
    return Node(
        name=name,
        kind=draft.kind,
        takes=takes,
        uses=uses,
        makes=known.makes(index),
        operation=draft.operation,
        dim=draft.dim,
        function=function,
        is_shared=draft.is_shared,
        has_skip="skip" in draft.parts,
        note=draft.note,
    )


def _follow(known: ResolvedFlow, reader: int, tag: str) -> str | None:
    """The value of a tag, or its state if the tag comes later; None with a mistake if there is no such tag."""
    if tag not in known.tags:
        _report_unknown(known, known.names[reader], tag)
        return None
    holder = known.tags[tag]
    if holder is None:
        return tag if tag in known.script.inputs else known.script.inputs[0]
    return known.makes(holder)[0] if holder < reader else STATE_MARK + tag


def _follow_over(known: ResolvedFlow, reader: int, tag: str) -> tuple[str, ...]:
    value = _follow(known, reader, tag)
    if value is not None and value.startswith(STATE_MARK):
        known.report(
            known.names[reader],
            f"a cycle: the map runs over tag {tag!r}, which comes after it",
            "tag an earlier point, or feed the state of the tag with using(...)",
        )
    return () if value is None else (value,)


def _report_unknown(known: ResolvedFlow, node: str, tag: str) -> None:
    hint = did_you_mean(tag, known.tags, otherwise=f"there are {', '.join(known.tags)}")
    known.report(node, f"unknown tag {tag!r}", hint)


def _build_module(known: ResolvedFlow, index: int) -> None:
    draft, name = known.script.drafts[index], known.names[index]
    parts = {part: _as_module(known, _path(name, part), given) for part, given in draft.parts.items()}
    ready = {part: module for part, module in parts.items() if module is not None}
    if len(ready) < len(parts) or draft.faults or draft.unfinished:
        return
    num_takes = 1 if draft.is_shared or draft.kind != "merge" else len(draft.takes)
    for fault in fault_of_calls(draft, ready, num_takes):
        known.report(name, fault.message, fault.hint)
    if ready:
        known.modules[name] = _assemble(draft, ready)


def _path(name: str, part: str) -> str:
    return f"{name}.{part}" if part else name


def _assemble(draft: Draft, parts: dict[str, nn.Module]) -> nn.Module:
    if draft.make is not None:
        return draft.make(parts)
    if draft.kind == "also":
        return nn.ModuleDict(parts)
    if draft.kind == "split":
        return nn.ModuleList(parts.values())
    return parts[""]


def _as_module(known: ResolvedFlow, path: str, given: Any) -> nn.Module | None:
    if isinstance(given, nn.Module):
        return given
    if isinstance(given, FlowDraft):
        return _nested(known, path, given)
    if callable(given) and not isinstance(given, type):
        return Call(given)
    known.report(path, f"expected a module, a flow or a function, got {given!r}", "pass an instance of nn.Module")
    return None


def _nested(known: ResolvedFlow, path: str, script: FlowDraft) -> Graph | None:
    if id(script) in known.open_scripts:
        known.report(path, "a cycle: the flow contains itself", "nest another flow, or repeat a module with loop(...)")
        return None
    if id(script) not in known.built_before:
        known.built_before[id(script)] = resolve(
            script, path, open_scripts=known.open_scripts, built_before=known.built_before
        )
    built = known.built_before[id(script)]
    known.mistakes += [mistake.inside(path) for mistake in built.mistakes]
    return built.graph


def _check_ends(known: ResolvedFlow, nodes: tuple[Node, ...]) -> None:
    """Nothing may be left dangling: open streams, inputs, forks, outputs."""
    script = known.script
    if len(script.streams) > 1 and script.streams[0].draft is not None:
        known.report(
            known.names[script.streams[0].draft],
            f"dangling split: {len(script.streams)} streams are still open at the end",
            'close them with merge("add"), merge("cat") or a function',
        )
    for tag in script.outputs:
        if tag not in known.tags:
            _report_unknown(known, "", tag)
    read = {value.removeprefix(STATE_MARK) for node in nodes for value in (*node.takes, *node.uses)}
    read |= set(script.outputs)
    for name in script.inputs[1:]:
        if name not in read:
            known.report("", f"input {name!r} is never used", f"feed it to a module with using({name!r})")
    for draft, node in zip(script.drafts, nodes, strict=True):
        if draft.kind == "fork" and not read & {node.name, *draft.tags}:
            known.report(node.name, "the fork is never used", "tag it, then name the tag in using(...) or output(...)")


def _plan(known: ResolvedFlow, name: str, nodes: tuple[Node, ...]) -> Wiring:
    script = known.script
    further = [_follow(known, len(script.drafts), tag) or tag for tag in script.outputs]
    return Wiring(
        name=name,
        inputs=tuple(script.inputs),
        nodes=nodes,
        outputs=(known.value(script.streams[0]), *further),
        tags=tuple((tag, known.makes(index)[0]) for tag, index in known.tags.items() if index is not None),
        states=_state_wires(known, nodes),
    )


def _state_wires(known: ResolvedFlow, nodes: tuple[Node, ...]) -> tuple[StateWire, ...]:
    """One wire for each tag that is read before it is made, in the order of reading."""
    wires: dict[str, StateWire] = {}
    for node in nodes:
        for tag in (value[1:] for value in node.uses if value.startswith(STATE_MARK)):
            holder = known.tags[tag]
            assert holder is not None, "an input cannot come later than its reader"
            wires.setdefault(
                tag,
                StateWire(
                    tag=tag, value=known.makes(holder)[0], reference=node.takes[0], size=known.script.sizes.get(tag)
                ),
            )
    return tuple(wires.values())
