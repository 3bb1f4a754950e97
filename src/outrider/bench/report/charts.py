"""The charts of the report: efficiency, shares, learning and idle time of the modes of one model.

Decides what is drawn; figures are plain dicts in the style of the timeline's pages. Called by the report's page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from outrider.bench.report.claims import trains_together
from outrider.bench.statistics import mean
from outrider.bench.suite.groups import INDEPENDENT, Group
from outrider.bench.suite.runs import EpochRow, SuiteRun
from outrider.bench.suite.suite_summary import ModeSummary, seconds_per_epoch
from outrider.timeline.web_page import CAUSE_COLOURS, RANK_COLOURS, Figure, Markup, figure, key, rank_colour

MAX_POINTS = 200
"""Of a curve; more make the page slow and show nothing more."""
EPOCHS, WALL_TIME, TRAINING_TIME = "epochs", "wall time", "training time"
_COLOURS = (*RANK_COLOURS, "#1b4f8a", "#b3541e", "#1f6e46", "#5e3488", "#8a2036", "#146a75", "#6d5313", "#3e4750")
"""Of modes: enough of them that no two curves of a chart are alike."""
_QUIET = "#9aa5b1"
_MODES = {"autorange": "reversed", "gridcolor": "rgba(0,0,0,0)"}
"""The axis of modes: the first one on top."""
_TOP, _BOTTOM = {"y": 1, "yanchor": "bottom"}, {"y": 0, "yanchor": "top", "yshift": -16}
"""Where the name of a line stands, so that two of them do not lie on each other."""


def efficiency_figure(summaries: Mapping[str, ModeSummary]) -> Figure:
    """A bar per mode; the ideal is a line at one, the ceiling of the machine a second one."""
    shown = [one for mode, one in summaries.items() if not mode.startswith("solo-") and one.efficiency is not None]
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": [one.mode for one in shown],
        "x": [one.efficiency for one in shown],
        "marker": {"color": [rank_colour(0) if trains_together(one.mode) else _QUIET for one in shown]},
        "error_x": _error_bars(shown),
        "hovertemplate": "%{y}: %{x:.3f}<extra></extra>",
        "showlegend": False,
    }
    ceiling = summaries.get(INDEPENDENT)
    lines = [_line_at(1.0, "ideal", dash="solid", edge=_TOP)]
    if ceiling is not None and ceiling.efficiency is not None:
        lines.append(_line_at(ceiling.efficiency, "independent", dash="dot", edge=_BOTTOM))
    farthest = max([1.0, *(one.efficiency or 0.0 for one in shown)])
    return figure(
        [bars],
        title="Efficiency",
        height=_height(len(shown)),
        xaxis={"range": [0, 1.08 * farthest], "side": "bottom"},
        yaxis=_MODES,
        shapes=[line["shape"] for line in lines],
        annotations=[line["note"] for line in lines],
    )


def _height(num_bars: int) -> int:
    return 130 + 26 * num_bars


def _error_bars(shown: Sequence[ModeSummary]) -> dict[str, object]:
    known = [(one.efficiency or 0.0, one.efficiency_ci95) for one in shown]
    return {
        "type": "data",
        "symmetric": False,
        "array": [0.0 if ci95 is None else ci95.high - value for value, ci95 in known],
        "arrayminus": [0.0 if ci95 is None else value - ci95.low for value, ci95 in known],
        "color": "#1f2933",
        "thickness": 1.2,
    }


def _line_at(value: float, text: str, *, dash: str, edge: Mapping[str, object]) -> dict[str, dict[str, object]]:
    line = {"color": "#1f2933", "width": 1.5, "dash": dash}
    return {
        "shape": {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": value, "x1": value, "line": line},
        "note": {"yref": "paper", "x": value, "text": text, "showarrow": False, "font": {"size": 11}, **edge},
    }


def share_figure(summaries: Mapping[str, ModeSummary]) -> Figure:
    """Which rank took which part of the samples."""
    shown = [one for mode, one in summaries.items() if not mode.startswith("solo-") and one.share_by_rank]
    num_ranks = max((len(one.share_by_rank) for one in shown), default=0)
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": f"rank {rank}",
            "y": [one.mode for one in shown],
            "x": [one.share_by_rank[rank] if rank < len(one.share_by_rank) else None for one in shown],
            "marker": {"color": rank_colour(rank)},
            "hovertemplate": f"rank {rank}: %{{x:.1%}}<extra></extra>",
        }
        for rank in range(num_ranks)
    ]
    return _stacked(bars, "Share of the samples", xaxis={"tickformat": ".0%", "range": [0, 1]}, num_bars=len(shown))


def idle_figure(summaries: Mapping[str, ModeSummary]) -> Figure:
    """Seconds that the ranks waited, by cause."""
    known = {mode: one.idle_s_by_cause for mode, one in summaries.items() if one.idle_s_by_cause is not None}
    causes = list(dict.fromkeys(cause for idle in known.values() for cause in idle))
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": cause,
            "y": list(known),
            "x": [idle.get(cause, 0.0) for idle in known.values()],
            "marker": {"color": CAUSE_COLOURS.get(cause, _QUIET)},
            "hovertemplate": f"{cause}: %{{x:.2f}} s<extra></extra>",
        }
        for cause in causes
    ]
    return _stacked(bars, "Idle by cause", xaxis={"title": "s per run, all ranks"}, num_bars=len(known))


def _stacked(bars: Sequence[Mapping[str, object]], title: str, *, xaxis: dict[str, object], num_bars: int) -> Figure:
    return figure(bars, title=title, height=_height(num_bars), barmode="stack", xaxis=xaxis, yaxis=_MODES)


def learning_figures(group: Group) -> list[Figure]:
    """Loss and evaluation, each against epochs and, where anything was timed, against wall time."""
    metric = group.subject.metric
    return [
        _curves(group, name, against, title=f"{label} against {against}")
        for name, label in (("eval", f"Evaluation ({metric})"), ("loss", "Training loss"))
        for against in ((EPOCHS, _clock(group)) if group.has_timed else (EPOCHS,))
    ]


def _clock(group: Group) -> str:
    """Wall time; training time where a record does not tell the other, so that all curves have the same clock."""
    timed = [epoch for mode in group.by_mode for run in group.judged(mode) if run.case.is_timed for epoch in run.epochs]
    return WALL_TIME if all(epoch.wall_s is not None for epoch in timed) else TRAINING_TIME


def learning_key(group: Group) -> Markup:
    """One legend for all charts, because a legend of many modes in every chart would take too much room."""
    return key(_colours(group))


def _colours(group: Group) -> dict[str, str]:
    return {mode: _COLOURS[number % len(_COLOURS)] for number, mode in enumerate(group.by_mode)}


def _curves(group: Group, name: str, against: str, *, title: str) -> Figure:
    places = {mode: _places(group, mode, against) for mode in group.by_mode}
    colours = _colours(group)
    lines = [
        _curve(mode, group.judged(mode), name, place_of, colour=colours[mode])
        for mode, place_of in places.items()
        if place_of is not None
    ]
    axis = {"title": _axis_title(group, against)}
    return figure([line for line in lines if line["y"]], title=title, xaxis=axis, height=380, showlegend=False)


Place = Callable[[Sequence[EpochRow]], float]
"""Where on the axis the same epoch of all seeds lies."""


def _places(group: Group, mode: str, against: str) -> Place | None:
    """None if it is not known: the mode was not timed."""
    if against == EPOCHS:
        return _epochs
    if all(run.case.is_timed for run in group.judged(mode)):
        return _wall_s if against == WALL_TIME else _train_s
    epoch_s = seconds_per_epoch(group.timed(mode))
    return None if epoch_s is None else lambda row: _epochs(row) * epoch_s


def _axis_title(group: Group, against: str) -> str:
    if against == EPOCHS:
        return "epochs"
    worked_out = "; untimed runs at the pace of timed ones" if group.has_untimed else ""
    left_out = "start-up" if against == WALL_TIME else "start-up and evaluation"
    return f"s, {left_out} excluded{worked_out}"


def _curve(mode: str, runs: Sequence[SuiteRun], name: str, place_of: Place, *, colour: str) -> dict[str, object]:
    """The mean over the seeds for each epoch; solo modes are dashed."""
    rows = [row for row in zip(*(run.epochs for run in runs), strict=False) if _is_known(row, name)]
    rows = thinned(rows, MAX_POINTS)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(rows) <= 20 else "lines",
        "name": mode,
        "x": [place_of(row) for row in rows],
        "y": [mean([getattr(epoch, name) for epoch in row]) for row in rows],
        "line": {"color": colour, "width": 2, "dash": "dot" if mode.startswith("solo-") else "solid"},
    }


def _wall_s(row: Sequence[EpochRow]) -> float:
    return mean([epoch.wall_s for epoch in row if epoch.wall_s is not None])


def _train_s(row: Sequence[EpochRow]) -> float:
    return mean([epoch.train_s for epoch in row])


def _epochs(row: Sequence[EpochRow]) -> float:
    return float(row[0].epoch + 1)


def _is_known(row: Iterable[EpochRow], name: str) -> bool:
    return all(getattr(epoch, name) is not None for epoch in row)


def thinned(rows: Sequence[tuple[EpochRow, ...]], most: int) -> list[tuple[EpochRow, ...]]:
    """Evenly spread ones, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]
