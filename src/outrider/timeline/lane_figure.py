"""The figure of a timeline: utilization, windows, averages, waits and idle gaps of every rank over one time axis.

Decides what is drawn, and reduces long timelines: spans that share a pixel become one bar, and samples are replaced by
their mean. Called by the timeline's page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from outrider.timeline.document import Timeline
from outrider.timeline.spans import AVERAGE, COMPUTE, WAIT, Span
from outrider.timeline.web_page import CAUSE_COLOURS, INK, QUIET, Figure, Markup, figure, key, rank_colour


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One or more spans with the same name, drawn as one bar; the less of it they fill, the paler it is."""

    start_s: float
    end_s: float
    seconds: float
    """Total duration of the spans, without the gaps between them."""
    name: str
    spans: tuple[Span, ...]

    @property
    def count(self) -> int:
        """Number of events; a span may represent several."""
        return sum(span.count for span in self.spans)


def as_bars(spans: Sequence[Span], *, limit: int) -> list[Bar]:
    """Merge spans into at most about `limit` bars per name; every second of a span is in exactly one bar."""
    if len(spans) <= limit:
        return [_bar((span,)) for span in spans]
    start_s = min(span.start_s for span in spans)
    slot_s = (max(span.end_s for span in spans) - start_s) / limit or 1.0
    slots = groupby(sorted(spans, key=lambda span: span.start_s), key=lambda s: int((s.start_s - start_s) / slot_s))
    return [bar for _, together in slots for bar in _bars_of(list(together))]


def _bars_of(together: list[Span]) -> Iterator[Bar]:
    for name in dict.fromkeys(span.name for span in together):
        yield _bar(tuple(span for span in together if span.name == name))


def _bar(together: tuple[Span, ...]) -> Bar:
    seconds = sum(span.seconds for span in together)
    first, end_s = together[0], max(span.end_s for span in together)
    return Bar(start_s=first.start_s, end_s=end_s, seconds=seconds, name=first.name, spans=together)


def thin_series(
    times_s: Sequence[float], values: Sequence[float | None], *, limit: int
) -> tuple[list[float], list[float | None]]:
    """Reduce a series to at most `limit` points: the mean of known values of consecutive samples, at the last time."""
    size = -(-len(times_s) // limit) if times_s else 1
    starts = range(0, len(times_s), size)
    return [times_s[min(i + size, len(times_s)) - 1] for i in starts], [_mean(values[i : i + size]) for i in starts]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 1) if known else None


Trace = dict[str, Any]

_ROWS = (COMPUTE, AVERAGE, WAIT, "idle gap")
_IDLE = "idle gap"
_AVERAGE_COLOUR = "#52606d"
_SETUP_COLOUR = "#cbd2d9"
_GUARD_COLOUR = "#d64545"
# Heights and margins in pixels.
_HEAD, _FOOT, _TITLE, _UTILIZATION, _LANES, _GAP, _WORLD = 28, 52, 22, 66, 76, 14, 96
# These limits keep a page below a megabyte.
_MAX_BARS, _MAX_POINTS = 6_000, 6_000
_MAX_EPOCH_LINES = 60
_MAX_OUTLINED = 250


def lanes_figure(timeline: Timeline) -> Figure:
    """The figure: one block per rank, and below them the anchor with its decisions."""
    ranks = list(timeline.devices)
    world = _world_traces(timeline, f"y{2 * len(ranks) + 1}")
    places = _Places(len(ranks), has_world=bool(world))
    all_spans = [part for span in timeline.spans for part in parted(span)] + _gap_spans(timeline)
    traces: list[Trace] = []
    for position, rank in enumerate(ranks):
        traces += _rank_traces(timeline, [span for span in all_spans if span.rank == rank], rank, position, len(ranks))
    traces += world
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "hovermode": "closest",
        "showlegend": False,
        "margin": {"l": 76, "r": 20, "t": _HEAD, "b": _FOOT},
        "annotations": [_title(timeline, rank, places.top(i)) for i, rank in enumerate(ranks)],
        "shapes": _epoch_lines(timeline),
        "xaxis": {
            "title": "seconds since the start",
            "anchor": places.lowest,
            "range": [0, timeline.end_s * 1.005],
        },
        **places.axes(),
    }
    return figure(traces, height=places.height, **layout)


class _Places:
    """The positions of the axes as fractions of the plot's height, measured from the bottom as plotly expects."""

    def __init__(self, num_ranks: int, *, has_world: bool) -> None:
        self._num_ranks = num_ranks
        self._has_world = has_world
        self._block = _TITLE + _UTILIZATION + _LANES + _GAP
        self._plot = num_ranks * self._block + (_TITLE + _WORLD if has_world else 0)
        self.height = self._plot + _HEAD + _FOOT
        self.lowest = f"y{2 * num_ranks + 1}" if has_world else f"y{2 * num_ranks}"

    def top(self, position: int) -> float:
        return 1 - position * self._block / self._plot

    def axes(self) -> dict[str, Any]:
        axes: dict[str, Any] = {}
        for position in range(self._num_ranks):
            top = position * self._block + _TITLE
            axes[_axis_name(2 * position + 1)] = {**_PERCENT_AXIS, "domain": self._domain(top, _UTILIZATION)}
            lanes = self._domain(top + _UTILIZATION + 4, _LANES)
            axes[_axis_name(2 * position + 2)] = {**_LANE_AXIS, "domain": lanes}
        if self._has_world:
            world = self._domain(self._num_ranks * self._block + _TITLE, _WORLD)
            axes[_axis_name(2 * self._num_ranks + 1)] = {**_ANCHOR_AXIS, "domain": world}
        return axes

    def _domain(self, top: int, height: int) -> list[float]:
        return [max(0.0, 1 - (top + height) / self._plot), 1 - top / self._plot]


# Only the time axis can be zoomed.
_PERCENT_AXIS = {"range": [0, 105], "tickvals": [0, 50, 100], "ticktext": ["0", "50", "100 %"], "fixedrange": True}
_ANCHOR_AXIS = {"title": "anchor", "rangemode": "tozero", "fixedrange": True}
_LANE_AXIS = {
    "fixedrange": True,
    "range": [len(_ROWS) - 0.5, -0.5],
    "tickvals": list(range(len(_ROWS))),
    "ticktext": list(_ROWS),
    "showgrid": False,
}


def _axis_name(number: int) -> str:
    return "yaxis" if number == 1 else f"yaxis{number}"


def _y(number: int) -> str:
    return "y" if number == 1 else f"y{number}"


def _title(timeline: Timeline, rank: int, top: float) -> dict[str, Any]:
    text = f"<b>rank {rank}</b> · {timeline.devices[rank]}"
    if not timeline.percents(rank)[0]:
        text += _quiet("utilization was not sampled")
    elif "%" in timeline.devices[rank]:
        text += _quiet("utilization of the whole GPU")
    font = {"size": 13, "color": rank_colour(rank)}
    where = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "top"}
    return {"text": text, "showarrow": False, "font": font, **where}


def _quiet(text: str) -> str:
    return f'  <span style="color:{QUIET}">{text}</span>'


def _epoch_lines(timeline: Timeline) -> list[dict[str, Any]]:
    ends = [event["t"] for event in timeline.of_kind("epoch end") if event["rank"] == 0]
    if len(ends) > _MAX_EPOCH_LINES:
        return []
    look = {"type": "line", "layer": "below", "line": {"color": "#b8c1cb", "width": 1, "dash": "dot"}}
    return [{**look, "xref": "x", "yref": "paper", "x0": t, "x1": t, "y0": 0, "y1": 1} for t in ends]


# Ranks


def parted(span: Span) -> Iterator[Span]:
    """Split a window of shared steps for drawing: first all compute, then all averages including waits."""
    average_s = span.facts.get("average_ms", 0.0) / 1e3 if span.name == "window" else 0.0
    if span.merged_s is not None:
        yield from _parted_slot(span, average_s)
        return
    middle_s = max(span.start_s, span.end_s - average_s)
    yield replace(span, end_s=middle_s)
    if average_s:
        yield replace(span, lane=AVERAGE, name="averages of shared steps", start_s=middle_s, facts={})


def _parted_slot(span: Span, average_s: float) -> Iterator[Span]:
    """Split merged windows: compute and averages each fill a part of the whole slot."""
    yield replace(span, merged_s=max(0.0, span.seconds - average_s))
    if average_s:
        count = {"count": span.count}
        yield replace(span, lane=AVERAGE, name="averages of shared steps", merged_s=average_s, facts=count)


def _rank_traces(timeline: Timeline, mine: Sequence[Span], rank: int, position: int, num_ranks: int) -> Iterator[Trace]:
    times_s, percents = thin_series(*timeline.percents(rank), limit=_MAX_POINTS // num_ranks)
    colour = rank_colour(rank)
    yield {
        "type": "scatter",
        "mode": "lines",
        "x": times_s,
        "y": percents,
        "yaxis": _y(2 * position + 1),
        "line": {"color": colour, "width": 1.2},
        "fill": "tozeroy",
        "fillcolor": f"{colour}26",
        "hovertemplate": f"rank {rank} · %{{y:.0f}} % at %{{x:.1f}} s<extra></extra>",
        "showlegend": False,
    }
    limit = _MAX_BARS // (len(_ROWS) * num_ranks)
    for row, lane in enumerate(_ROWS):
        bars = as_bars([span for span in mine if span.lane == lane], limit=limit)
        for name in dict.fromkeys(bar.name for bar in bars):
            same = [bar for bar in bars if bar.name == name]
            yield _bars(same, lane=lane, row=row, colour=_colour(lane, name, rank), yaxis=_y(2 * position + 2))


def _bars(bars: Sequence[Bar], *, lane: str, row: int, colour: str, yaxis: str) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "base": [round(bar.start_s, 4) for bar in bars],
        "x": [round(bar.end_s - bar.start_s, 4) for bar in bars],
        "y": [row] * len(bars),
        "yaxis": yaxis,
        "width": 0.72,
        # An outline keeps bars visible that are narrower than a pixel; around many bars it would hide the gaps.
        "marker": {
            "color": colour,
            "line": {"color": colour, "width": 0.6 if len(bars) <= _MAX_OUTLINED else 0},
            "opacity": [_opacity(bar) for bar in bars] if any(bar.count > 1 for bar in bars) else 1,
        },
        "text": [_hover(bar, lane) for bar in bars],
        "textposition": "none",
        "hovertemplate": "%{text}<br>at %{base:.2f} s<extra></extra>",
        "showlegend": False,
    }


def _opacity(bar: Bar) -> float:
    """The opacity of a bar: the fraction that its spans fill, with a visible minimum."""
    length_s = bar.end_s - bar.start_s
    return round(max(0.15, min(1.0, bar.seconds / length_s)), 2) if length_s > 0 else 1.0


def _colour(lane: str, name: str, rank: int) -> str:
    if lane == AVERAGE:
        return _AVERAGE_COLOUR
    if name == "set-up":
        return _SETUP_COLOUR
    return CAUSE_COLOURS.get(name, rank_colour(rank))


def _hover(bar: Bar, lane: str) -> str:
    facts = bar.spans[0].facts
    many = bar.count > 1
    what = {WAIT: f"wait: {bar.name}", _IDLE: f"idle: {bar.name}"}.get(lane, bar.name)
    if many:
        what = f"{bar.count:,} × {what}"
    elif "window" in facts:
        what += f" {facts['window']}"
    parts = [what, _duration(bar.seconds)]
    if bar.name == "window":
        parts.append(f"{sum(span.facts['batches'] for span in bar.spans)} batches")
    if facts.get("drift") is not None and not many:
        parts.append(f"drift {facts['drift']:.2g}")
    return " · ".join(parts)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _gap_spans(timeline: Timeline) -> list[Span]:
    return [
        Span(rank=gap.rank, lane=_IDLE, name=gap.cause, start_s=gap.start_s, end_s=gap.end_s) for gap in timeline.gaps
    ]


def lanes_key() -> Markup:
    """The legend of the lanes, without the colours of the ranks."""
    colours = {"set-up": _SETUP_COLOUR, "average": _AVERAGE_COLOUR}
    colours |= {"evaluation" if cause == "evaluation" else f"idle: {cause}": c for cause, c in CAUSE_COLOURS.items()}
    return key(colours)


# The world


def _world_traces(timeline: Timeline, yaxis: str) -> list[Trace]:
    plans = [plan for plan in timeline.of_kind("plan") if plan.get("anchor") is not None]
    if not plans:
        return []
    times_s = [plan["t"] for plan in plans]
    anchors = [plan["anchor"] for plan in plans]
    kept = [i for i in range(len(plans)) if i in (0, len(plans) - 1) or anchors[i] != anchors[i - 1]]
    line = {
        "type": "scatter",
        "mode": "lines",
        "x": [times_s[i] for i in kept],
        "y": [anchors[i] for i in kept],
        "yaxis": yaxis,
        "line": {"color": INK, "width": 1.4, "shape": "hv"},
        "hovertemplate": "anchor %{y} from %{x:.2f} s<extra></extra>",
        "showlegend": False,
    }
    marks = [_marks(timeline, kind, yaxis, times_s, anchors) for kind in ("anchor", "guard")]
    return [line, *(trace for trace in marks if trace["x"])]


_MARKERS = {
    "anchor": {"symbol": "triangle-up", "size": 7, "color": INK},
    "guard": {"symbol": "diamond", "size": 7, "color": _GUARD_COLOUR},
}


def _marks(timeline: Timeline, kind: str, yaxis: str, times_s: Sequence[float], anchors: Sequence[int]) -> Trace:
    """Decisions as markers on the line of the anchor, with the reason as hover text."""
    events = timeline.of_kind(kind)[-_MAX_POINTS // 10 :]
    heights = _heights((event["t"] for event in events), times_s, anchors)
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [event["t"] for event in events],
        "y": heights,
        "yaxis": yaxis,
        "marker": _MARKERS[kind],
        "text": [f"{kind}: {event.get('value')}<br>{event.get('reason', '')}" for event in events],
        "hovertemplate": "%{text}<br>at %{x:.2f} s<extra></extra>",
    }


def _heights(moments_s: Iterable[float], times_s: Sequence[float], anchors: Sequence[int]) -> list[int]:
    """The anchor at each of the given moments; moments and times are in ascending order."""
    heights, i = [], 0
    for moment_s in moments_s:
        while i + 1 < len(times_s) and times_s[i + 1] <= moment_s:
            i += 1
        heights.append(anchors[i])
    return heights
