"""Draws a graph: Mermaid and DOT text for other tools, and SVG in pure Python for light and dark backgrounds.

Decides how a diagram looks, and the format by the suffix of the file name. `diagram_layout` decides coordinates.
Called by the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path

from outrider.errors import ConfigError
from outrider.flow.diagram import Arrow, Box, Diagram, diagram_of
from outrider.flow.diagram_layout import HEAD, MARGIN, DiagramLane, Layout, NodePlace, Route, lay_out
from outrider.flow.emit import Wired
from outrider.flow.profile import Profile

_ACCENTS = {
    "through": "#3b82f6", "also": "#6366f1", "fork": "#64748b", "split": "#0d9488", "loop": "#d97706",
    "gate": "#a855f7", "switch": "#db2777", "map": "#16a34a",
}  # fmt: skip


def to_svg(diagram: Diagram) -> str:
    """The whole picture."""
    layout = lay_out(diagram)
    width, height = round(layout.width), round(layout.height) + (34 if _has_heat(diagram) else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(diagram.title)}">',
        f"<style>\n{_style()}</style>",
        _tips(),
        f'<rect class="ground" width="{width}" height="{height}"/>',
        f'<text class="title" x="{MARGIN}" y="{MARGIN + 8}">{escape(diagram.title)}</text>',
        f'<text class="fact" x="{MARGIN}" y="{MARGIN + HEAD - 32}">{escape(diagram.subtitle)}</text>',
        *(_route(route, layout) for route in layout.routes),
        *(_state(lane, layout) for lane in layout.lanes),
        *(part for box in diagram.boxes for part in _box(box, layout.places[box.name])),
        *(_legend(height) if _has_heat(diagram) else ()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _has_heat(diagram: Diagram) -> bool:
    return any(box.heat is not None for box in diagram.boxes)


@cache
def _style() -> str:
    """Colours for light and dark backgrounds."""
    return resources.files("outrider.flow").joinpath("graph_drawing.css").read_text(encoding="utf-8")


def _tips() -> str:
    """The heads of the arrows."""
    marker = (
        '<marker id="{0}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="{0}" d="M0 0.8 L8 4 L0 7.2 z"/></marker>'
    )
    return f"<defs>{marker.format('tip')}{marker.format('state-tip')}</defs>"


def _box(box: Box, place: NodePlace) -> Iterator[str]:
    x, y = place.x - place.width / 2, place.y - place.height / 2
    radius = place.height / 2 if box.kind in ("input", "output", "join") else 7.0
    shape = {"input": "end", "output": "end", "join": "join"}.get(box.kind, "box")
    frame = f'x="{x:.1f}" y="{y:.1f}" width="{place.width:.1f}" height="{place.height:.1f}" rx="{radius:.1f}"'
    dash = ' stroke-dasharray="4 3"' if box.kind == "fork" else ""
    yield f'<g><title>{escape(" · ".join(box.lines))}</title><rect class="{shape}" {frame}{dash}/>'
    if box.heat is not None and box.kind != "join":
        yield f'<rect class="heat" fill-opacity="{0.04 + 0.56 * box.heat:.2f}" {frame}/>'
    if box.kind in _ACCENTS:
        bar = f'x="{x + 6:.1f}" y="{y + 8:.1f}" width="3" height="{place.height - 16:.1f}" rx="1.5"'
        yield f'<rect fill="{_ACCENTS[box.kind]}" {bar}/>'
    yield from _texts(box, place)
    yield "</g>"


def _texts(box: Box, place: NodePlace) -> Iterator[str]:
    top = place.y - 16.0 * len(box.lines) / 2
    for index, line in enumerate(box.lines):
        style = "name" if index == 0 and box.kind != "join" else "fact"
        x = place.x + (3 if box.kind in _ACCENTS else 0)
        at = f'x="{x:.1f}" y="{top + 12 + 16 * index:.1f}" text-anchor="middle"'
        yield f'<text class="{style}" {at}>{escape(line)}</text>'


def _route(route: Route, layout: Layout) -> str:
    """A smooth line from box to box, straight past the layers where it does not stop."""
    source, target = layout.places[route.arrow.source], layout.places[route.arrow.target]
    x, y = source.x, source.y + source.height / 2
    path = [f"M{x:.1f} {y:.1f}"]
    for bend in route.bends:
        path += [_curve(x, y, bend.x, bend.y - bend.height / 2), f"L{bend.x:.1f} {bend.y + bend.height / 2:.1f}"]
        x, y = bend.x, bend.y + bend.height / 2
    path.append(_curve(x, y, target.x, target.y - target.height / 2))
    return f'<path class="line" marker-end="url(#tip)" d="{" ".join(path)}"/>'


def _curve(x: float, y: float, to_x: float, to_y: float) -> str:
    middle = (y + to_y) / 2
    return f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"


def _state(lane: DiagramLane, layout: Layout) -> str:
    """A recurrent state: dashed, back up along its lane at the right."""
    source, target = layout.places[lane.arrow.source], layout.places[lane.arrow.target]
    start_x, start_y = source.x + source.width / 2, source.y + source.height / 4
    end_x, end_y = target.x + target.width / 2, target.y - target.height / 4
    path = (
        f"M{start_x:.1f} {start_y:.1f} H{lane.x - 8:.1f} Q{lane.x:.1f} {start_y:.1f} {lane.x:.1f} {start_y - 8:.1f} "
        f"V{end_y + 8:.1f} Q{lane.x:.1f} {end_y:.1f} {lane.x - 8:.1f} {end_y:.1f} H{end_x:.1f}"
    )
    at = f'x="{lane.x + 6:.1f}" y="{(start_y + end_y) / 2 + 4:.1f}"'
    return (
        f'<path class="state" marker-end="url(#state-tip)" d="{path}"/>'
        f'<text class="state-name" {at}>{escape(lane.label)}</text>'
    )


def _legend(height: int) -> Iterator[str]:
    y = height - 30
    for step in range(11):
        yield (
            f'<rect class="heat" fill-opacity="{0.04 + 0.056 * step:.2f}" '
            f'x="{MARGIN + 12 * step:.0f}" y="{y}" width="12" height="10"/>'
        )
    yield f'<text class="fact" x="{MARGIN + 140:.0f}" y="{y + 9}">share of time, relative to the hottest node</text>'


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
    labels = {box.name: _quoted("\n".join(box.lines)) for box in diagram.boxes}
    boxes = [f"    {keys[box.name]} [label={labels[box.name]}{_dot_shape(box)}];" for box in diagram.boxes]
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


def _quoted(text: str) -> str:
    body = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{body}"'


_WRITERS: dict[str, Callable[[Diagram], str]] = {".svg": to_svg, ".mmd": to_mermaid, ".dot": to_dot}


def draw_to(path: Path, graph: Wired, profile: Profile | None) -> Path:
    """Write the picture and return its path."""
    if path.suffix not in _WRITERS:
        raise ConfigError(
            f"cannot draw a {path.suffix or 'file without an ending'}: {path}",
            hint=f"use one of {', '.join(_WRITERS)}",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_WRITERS[path.suffix](diagram_of(graph, profile)), encoding="utf-8")
    return path
