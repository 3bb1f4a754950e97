"""A diagram as an SVG picture that is legible on light and on dark ground, in pure Python.

Decides colours and lines; places come from `layout`. Called by `picture`.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from outrider.flow.diagram import Box, Diagram
from outrider.flow.layout import HEAD, MARGIN, Lane, Layout, Place, Route, lay_out

_ACCENTS = {
    "through": "#3b82f6", "also": "#6366f1", "fork": "#64748b", "split": "#0d9488", "loop": "#d97706",
    "gate": "#a855f7", "switch": "#db2777", "map": "#16a34a",
}  # fmt: skip

_STYLE = """
text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif; font-size: 11px; }
.ground { fill: #ffffff; }
.title { font-size: 15px; font-weight: 600; fill: #0f172a; }
.name { font-size: 12px; font-weight: 600; fill: #0f172a; }
.fact { fill: #475569; }
.box { fill: #f8fafc; stroke: #cbd5e1; }
.end { fill: #e2e8f0; stroke: #94a3b8; }
.join { fill: #ffffff; stroke: #64748b; }
.heat { fill: #f97316; }
.line { fill: none; stroke: #94a3b8; stroke-width: 1.4; }
.state { fill: none; stroke: #d97706; stroke-width: 1.4; stroke-dasharray: 5 4; }
.state-name { fill: #b45309; }
.tip { fill: #94a3b8; }
.state-tip { fill: #d97706; }
"""

_DARK = """
@media (prefers-color-scheme: dark) {
.ground { fill: #0f172a; }
.title, .name { fill: #f1f5f9; }
.fact { fill: #a9b7ca; }
.box { fill: #1e293b; stroke: #475569; }
.end { fill: #334155; stroke: #64748b; }
.join { fill: #0f172a; stroke: #94a3b8; }
.heat { fill: #ea580c; }
.line { stroke: #64748b; }
.tip { fill: #64748b; }
.state-name { fill: #fbbf24; }
}
"""


def to_svg(diagram: Diagram) -> str:
    """The whole picture."""
    layout = lay_out(diagram)
    width, height = round(layout.width), round(layout.height) + (34 if _has_heat(diagram) else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(diagram.title)}">',
        f"<style>{_STYLE}{_DARK}</style>",
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


def _tips() -> str:
    """The heads of the arrows."""
    marker = (
        '<marker id="{0}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="{0}" d="M0 0.8 L8 4 L0 7.2 z"/></marker>'
    )
    return f"<defs>{marker.format('tip')}{marker.format('state-tip')}</defs>"


def _box(box: Box, place: Place) -> Iterator[str]:
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


def _texts(box: Box, place: Place) -> Iterator[str]:
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


def _state(lane: Lane, layout: Layout) -> str:
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
