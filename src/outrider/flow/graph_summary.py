"""A graph as a table of text: a tree of nodes with output shapes and parameter counts, 80 columns wide.

Decides the layout only; shapes come from the last shape check and are left blank before. Called by `Graph.summary`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from outrider.flow.emit import Wired
from outrider.flow.specs import describe
from outrider.flow.wiring import STATE_MARK, Node, State

WIDTH = 80
_NAME, _WHAT, _SHAPE, _COUNT = 28, 20, 18, 11


@dataclass(frozen=True, kw_only=True, slots=True)
class SummaryRow:
    """One line of the table."""

    name: str
    what: str
    shape: str
    count: str


def summary(graph: Wired, *, depth: int) -> str:
    """The table, with a head of names and a foot of totals."""
    rows = [SummaryRow(name="node", what="what", shape="output", count="parameters")]
    rows += [SummaryRow(name=name, what="input", shape=_shape(graph, name), count="") for name in graph.plan.inputs]
    rows += _graph_rows(graph, graph, "", "", depth)
    lines = [_line(row) for row in rows]
    rule = "─" * WIDTH
    return "\n".join([graph.plan.name, rule, lines[0], rule, *lines[1:], rule, _totals(graph)])


def _totals(graph: nn.Module) -> str:
    total = sum(parameter.numel() for parameter in graph.parameters())
    trained = sum(parameter.numel() for parameter in graph.parameters() if parameter.requires_grad)
    frozen = "" if trained == total else f", {total - trained:,} frozen"
    return f"{total:,} parameters{frozen}"


def _line(row: SummaryRow) -> str:
    cells = (
        _fit(row.name, _NAME).ljust(_NAME),
        _fit(row.what, _WHAT).ljust(_WHAT),
        _fit(row.shape, _SHAPE).ljust(_SHAPE),
    )
    return " ".join((*cells, row.count.rjust(_COUNT))).rstrip()


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _graph_rows(root: Wired, graph: Wired, path: str, indent: str, depth: int) -> Iterator[SummaryRow]:
    """The nodes of a graph, each with its parts below it."""
    for index, node in enumerate(graph.plan.nodes):
        branch, below = ("└─ ", "   ") if index == len(graph.plan.nodes) - 1 else ("├─ ", "│  ")
        at = f"{path}.{node.name}" if path else node.name
        module = getattr(graph, node.name, None)
        value = f"{path}.{node.makes[0]}" if path else node.makes[0]
        what = _what(node, module)
        yield SummaryRow(name=indent + branch + node.name, what=what, shape=_shape(root, value), count=_count(module))
        if isinstance(module, nn.Module) and depth > 1:
            yield from _part_rows(root, module, at, indent + below, depth - 1)


def _part_rows(root: Wired, module: nn.Module, path: str, indent: str, depth: int) -> Iterator[SummaryRow]:
    if isinstance(module, Wired):
        yield from _graph_rows(root, module, path, indent, depth)
        return
    children = [(name, child) for name, child in module.named_children() if not isinstance(child, State)]
    for index, (name, child) in enumerate(children):
        branch, below = ("└─ ", "   ") if index == len(children) - 1 else ("├─ ", "│  ")
        at = f"{path}.{name}"
        yield SummaryRow(name=indent + branch + name, what=_class(child), shape=_shape(root, at), count=_count(child))
        if depth > 1:
            yield from _part_rows(root, child, at, indent + below, depth - 1)


def _what(node: Node, module: nn.Module | None) -> str:
    """The class of a plain module; else the kind of node, its note, and tags it is fed."""
    if node.kind in ("through", "fork"):
        text = node.function.rpartition(".")[2] or _class(module)
        text = f"{text} (fork)" if node.kind == "fork" else text
    else:
        text = f"{node.kind} {node.note or node.function.rpartition('.')[2]}".strip()
    fed = ", ".join(f"{use[1:]} before" if use.startswith(STATE_MARK) else use for use in node.uses)
    return f"{text} ← {fed}" if fed else text


def _class(module: nn.Module | None) -> str:
    return "Flow" if isinstance(module, Wired) else type(module).__name__


def _shape(root: Wired, value: str) -> str:
    spec = root.shapes.get(value)
    return "" if spec is None else describe(spec)


def _count(module: nn.Module | None) -> str:
    count = sum(parameter.numel() for parameter in module.parameters()) if isinstance(module, nn.Module) else 0
    return f"{count:,}" if count else ""
