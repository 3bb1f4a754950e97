"""Computes the layout of a diagram: layers from top to bottom, few crossings, straight main lines.

Decides coordinates in pixels, not colours. The method is Sugiyama's: layers by longest path, order by barycentres,
places by least squares under a minimum distance. Called by `svg`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.flow.diagram import Arrow, Box, Diagram

GAP_X, GAP_Y, MARGIN, HEAD = 26.0, 34.0, 28.0, 58.0
LANE = 22.0
"""Room for the line of a recurrent state at the right, beside its name."""
_LINE_HEIGHT, _LETTER, _TITLE_LETTER, _BEND_WIDTH = 16.0, 6.5, 7.6, 18.0
_BOX_WEIGHT, _BEND_WEIGHT = 1.0, 0.001
"""Which of two elements gives way if both want the same place."""
_BEND = "bend "
"""How the names of places begin where an arrow passes a layer; a box has no space in its name but an output."""
_SWEEPS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlace:
    """A box with its centre and its size."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """An arrow with the points it passes: (x, top, bottom) of each layer it crosses without stopping."""

    arrow: Arrow
    bends: tuple[NodePlace, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiagramLane:
    """The upright line of a recurrent state, its name to the right of it."""

    arrow: Arrow
    x: float
    label: str
    label_width: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Everything in its place."""

    width: float
    height: float
    places: Mapping[str, NodePlace]
    routes: tuple[Route, ...]
    lanes: tuple[DiagramLane, ...]


@dataclass(kw_only=True, slots=True)
class Layering:
    """Boxes and bends by layer, with their neighbours above and below."""

    layers: list[list[str]]
    above: dict[str, list[str]] = field(default_factory=dict)
    below: dict[str, list[str]] = field(default_factory=dict)
    chains: dict[Arrow, list[str]] = field(default_factory=dict)

    def link(self, upper: str, lower: str) -> None:
        self.below.setdefault(upper, []).append(lower)
        self.above.setdefault(lower, []).append(upper)


def lay_out(diagram: Diagram) -> Layout:
    """Place all boxes and route all arrows."""
    forward = [arrow for arrow in diagram.arrows if not arrow.state]
    sizes = {box.name: size_of(box) for box in diagram.boxes}
    layering = _layering(diagram.boxes, forward)
    _order(layering)
    head_width = max(_TITLE_LETTER * 1.3 * len(diagram.title), _LETTER * len(diagram.subtitle))
    places = _places(layering, sizes, _columns(layering, sizes))
    right = max(place.x + place.width / 2 for place in places.values())
    lanes = _lanes([arrow for arrow in diagram.arrows if arrow.state], right)
    right = max([right, MARGIN + head_width, *(lane.x + lane.label_width for lane in lanes)])
    return Layout(
        width=right + MARGIN,
        height=max(place.y + place.height / 2 for place in places.values()) + MARGIN,
        places=places,
        routes=tuple(Route(arrow=a, bends=tuple(places[bend] for bend in layering.chains[a])) for a in forward),
        lanes=lanes,
    )


def _lanes(states: Sequence[Arrow], right: float) -> tuple[DiagramLane, ...]:
    """A lane for each recurrent state, from left to right beside all boxes."""
    lanes: list[DiagramLane] = []
    for arrow in states:
        label = f"{arrow.state}, before"
        x = (lanes[-1].x + lanes[-1].label_width if lanes else right) + LANE
        lanes.append(DiagramLane(arrow=arrow, x=x, label=label, label_width=_LETTER * len(label) + 8))
    return tuple(lanes)


def size_of(box: Box) -> tuple[float, float]:
    """(width, height) that the text of a box needs."""
    if box.kind == "join":
        return max(30.0, _LETTER * len(box.lines[0]) + 18), 24.0
    text = max(_TITLE_LETTER * len(box.lines[0]), *(_LETTER * len(line) for line in box.lines))
    return max(84.0, text + 34), _LINE_HEIGHT * len(box.lines) + 14


def _layering(boxes: Sequence[Box], arrows: Sequence[Arrow]) -> Layering:
    depth = _depths(boxes, arrows)
    layering = Layering(layers=[[] for _ in range(max(depth.values()) + 1)])
    for box in boxes:
        layering.layers[depth[box.name]].append(box.name)
    for number, arrow in enumerate(dict.fromkeys(arrows)):
        chain = [f"{_BEND}{number} {layer}" for layer in range(depth[arrow.source] + 1, depth[arrow.target])]
        for layer, bend in enumerate(chain, start=depth[arrow.source] + 1):
            layering.layers[layer].append(bend)
        for upper, lower in zip((arrow.source, *chain), (*chain, arrow.target), strict=True):
            layering.link(upper, lower)
        layering.chains[arrow] = chain
    return layering


def _depths(boxes: Sequence[Box], arrows: Sequence[Arrow]) -> dict[str, int]:
    """The layer of each box: below everything it takes; inputs just above their first reader."""
    depth = {box.name: 0 for box in boxes}
    for _ in boxes:
        deeper = {a.target: depth[a.source] + 1 for a in arrows if depth[a.target] <= depth[a.source]}
        if not deeper:
            break
        depth |= deeper
    for box in boxes:
        readers = [depth[arrow.target] for arrow in arrows if arrow.source == box.name]
        if box.kind == "input" and readers:
            depth[box.name] = min(readers) - 1
    return depth


def _order(layering: Layering) -> None:
    """Sort each layer by the mean position of its neighbours, down and up in turn."""
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        layers = layering.layers if downwards else layering.layers[::-1]
        neighbours = layering.above if downwards else layering.below
        for fixed, free in itertools.pairwise(layers):
            rank = {name: index for index, name in enumerate(fixed)}
            free.sort(key=lambda name: _mean([rank[n] for n in neighbours.get(name, []) if n in rank], len(rank) / 2))


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _columns(layering: Layering, sizes: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """The centre of each box and bend: boxes under boxes, the bends of one arrow in one line beside them."""
    widths = {name: sizes.get(name, (_BEND_WIDTH, 0.0))[0] for layer in layering.layers for name in layer}
    chains = {bend: (arrow.source, chain) for arrow, chain in layering.chains.items() for bend in chain}
    xs: dict[str, float] = {}
    for layer in layering.layers:
        xs |= _apart(layer, dict.fromkeys(layer, 0.0), widths)
    for sweep in range(2 * _SWEEPS):
        for layer in layering.layers if sweep % 2 == 0 else reversed(layering.layers):
            wanted = {n: _wanted_bend(*chains[n], xs) if n in chains else _wanted(n, layering, xs) for n in layer}
            xs |= _apart(layer, wanted, widths)
    return xs


def _wanted(name: str, layering: Layering, xs: Mapping[str, float]) -> float:
    """The preferred place of a box: between the boxes above and below, or between bends if there are no boxes."""
    near = [*layering.above.get(name, []), *layering.below.get(name, [])]
    boxes = [other for other in near if not other.startswith(_BEND)]
    return _mean([xs[other] for other in boxes or near], xs[name])


def _wanted_bend(source: str, chain: Sequence[str], xs: Mapping[str, float]) -> float:
    """As far out as the farthest bend of the same arrow, so that they end up in one line."""
    return max((xs[bend] for bend in chain), key=lambda x: abs(x - xs[source]))


def _apart(layer: Sequence[str], wanted: Mapping[str, float], widths: Mapping[str, float]) -> dict[str, float]:
    """The places nearest to those wanted, in the given order and at least a gap apart (pool adjacent violators)."""
    offsets: list[float] = []
    for index, name in enumerate(layer):
        step = 0.0 if index == 0 else offsets[-1] + (widths[layer[index - 1]] + widths[name]) / 2 + GAP_X
        offsets.append(step)
    pools: list[tuple[float, float, int]] = []  # (weighted mean, weight, members)
    for name, offset in zip(layer, offsets, strict=True):
        pools.append((wanted[name] - offset, _BEND_WEIGHT if name.startswith(_BEND) else _BOX_WEIGHT, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            right, left = pools.pop(), pools.pop()
            weight = left[1] + right[1]
            pools.append(((left[0] * left[1] + right[0] * right[1]) / weight, weight, left[2] + right[2]))
    bases = [mean for mean, _, members in pools for _ in range(members)]
    return {name: base + offset for name, base, offset in zip(layer, bases, offsets, strict=True)}


def _places(
    layering: Layering, sizes: Mapping[str, tuple[float, float]], xs: Mapping[str, float]
) -> dict[str, NodePlace]:
    """Centres in the coordinates of the picture, the top left corner at zero."""
    left = min(xs[name] - sizes.get(name, (_BEND_WIDTH, 0.0))[0] / 2 for name in xs)
    places: dict[str, NodePlace] = {}
    y = MARGIN + HEAD
    for layer in layering.layers:
        height = max(sizes.get(name, (0.0, 0.0))[1] for name in layer)
        for name in layer:
            own = sizes.get(name, (_BEND_WIDTH, height))
            places[name] = NodePlace(x=xs[name] + MARGIN - left, y=y + height / 2, width=own[0], height=own[1])
        y += height + GAP_Y
    return places
