"""A graph as Mermaid and as DOT text, for documents and for tools that draw by themselves.

Decides the syntax only; what is drawn comes from `diagram`. Called by `Graph` and `picture`.
"""

from __future__ import annotations

from outrider.flow.diagram import Arrow, Box, Diagram


def to_mermaid(diagram: Diagram) -> str:
    """A Mermaid flowchart, top to bottom."""
    keys = _keys(diagram)
    boxes = [f"    {keys[box.name]}{_mermaid_shape(box)}" for box in diagram.boxes]
    arrows = [f"    {keys[arrow.source]} {_mermaid_arrow(arrow)} {keys[arrow.target]}" for arrow in diagram.arrows]
    return "\n".join(["flowchart TD", *boxes, *arrows]) + "\n"


def to_dot(diagram: Diagram) -> str:
    """A DOT digraph, top to bottom."""
    keys = _keys(diagram)
    head = [
        f"digraph {_quoted(diagram.title)} {{",
        "    rankdir=TB;",
        '    node [shape=box, style=rounded, fontname="sans-serif"];',
    ]
    boxes = [f"    {keys[box.name]} [label={_quoted(_escaped_lines(box))}{_dot_shape(box)}];" for box in diagram.boxes]
    arrows = [f"    {keys[arrow.source]} -> {keys[arrow.target]}{_dot_arrow(arrow)};" for arrow in diagram.arrows]
    return "\n".join([*head, *boxes, *arrows, "}"]) + "\n"


def _keys(diagram: Diagram) -> dict[str, str]:
    """Short names that both syntaxes take as they are."""
    return {box.name: f"n{index}" for index, box in enumerate(diagram.boxes)}


def _mermaid_shape(box: Box) -> str:
    text = "<br/>".join(line.replace('"', "#quot;") for line in box.lines)
    if box.kind in ("input", "output"):
        return f'(["{text}"])'
    return f'(("{text}"))' if box.kind == "join" else f'["{text}"]'


def _mermaid_arrow(arrow: Arrow) -> str:
    return f'-. "{arrow.state}, before" .->' if arrow.state else "-->"


def _dot_shape(box: Box) -> str:
    if box.kind == "join":
        return ", shape=circle"
    return ", shape=oval" if box.kind in ("input", "output") else ""


def _dot_arrow(arrow: Arrow) -> str:
    return f' [style=dashed, constraint=false, label="{arrow.state}, before"]' if arrow.state else ""


def _escaped_lines(box: Box) -> str:
    return "\n".join(box.lines)


def _quoted(text: str) -> str:
    body = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{body}"'
