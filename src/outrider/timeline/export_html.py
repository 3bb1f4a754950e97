"""A timeline as a web page: lanes, learning curves, shares and idle time; works from disk without a network.

Decides what the page shows; `web_page` decides how it looks. Needs plotly; the other formats do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.timeline import web_page as page
from outrider.timeline.document import Timeline
from outrider.timeline.idle import ALL_CAUSES
from outrider.timeline.lane_figure import lanes_figure, lanes_key
from outrider.timeline.timeline_summary import RankSummary, summarize

_LOSS, _EVAL = page.INK, page.CAUSE_COLOURS["evaluation"]
_MAX_EPOCHS = 1_000
_UNKNOWN = "–"
_RIGHT_AXIS = {"overlaying": "y", "side": "right", "showgrid": False, "tickmode": "auto"}

Epoch = Mapping[str, Any]


def write_html(timeline: Timeline, folder: Path) -> Path:
    """Write `timeline.html`, with plotly.js beside it."""
    ranks = summarize(timeline)
    epochs = _thinned(timeline.record.get("epochs") or [])
    sections = [_lanes(timeline)] if ranks else []
    if epochs:
        sections += [_learning(epochs)]
    sections += [_ranks(ranks, epochs), _idle(ranks)] if ranks else []
    return page.write_page(
        folder,
        "timeline.html",
        f"Timeline of {timeline.name}",
        sections,
        lead=_lead(timeline),
        facts=_facts(timeline),
        footer="Drawn from timeline.json and record.json in this folder, which hold all events; long runs are "
        "down-sampled here. trace.json opens in Perfetto.",
    )


def _lead(timeline: Timeline) -> str:
    record = timeline.record
    ranks = " and ".join(f"{device} (rank {rank})" for rank, device in timeline.devices.items())
    policy = record.get("policy")
    by = f" with policy {policy}, averages by {record['backend']}" if policy and record.get("backend") else ""
    when = f", started {record['started_at'][:16].replace('T', ' ')}" if record.get("started_at") else ""
    return f"Trained on {ranks}{by}{when}.{_gaps_in_events(timeline)}"


def _gaps_in_events(timeline: Timeline) -> str:
    """Notes about missing data."""
    told = "".join(f" Events of rank {rank} are missing: {why}." for rank, why in timeline.missing.items())
    status = timeline.record.get("status")
    if timeline.is_from_event_files and status != "finished":
        told += f" The run had not ended when this page was written (its record says {status!r})."
    return told


def _facts(timeline: Timeline) -> list[tuple[str, str]]:
    totals = timeline.record.get("totals") or {}
    epochs = timeline.record.get("epochs") or []
    return [
        ("wall time with set-up", _number(timeline.end_s, ",.1f", " s")),
        ("epochs", str(len(epochs)) if epochs else _UNKNOWN),
        ("samples per second", _number(totals.get("samples_per_s"), ",.0f")),
        ("last evaluation", _number(totals.get("eval"), ".4g")),
        ("averages", _number(totals.get("averages"), ",")),
        ("of the time in averages", _percent(totals.get("exposed_average_fraction"))),
        ("of the time waiting for others, or resting", _percent(totals.get("wait_fraction"))),
    ]


def _lanes(timeline: Timeline) -> page.PageSection:
    return page.PageSection(
        title="What every rank did",
        note="Drag to zoom, double-click to zoom out, hover for details. Dotted lines end epochs. A throttled CPU rank "
        "stays below 100 %: that is what its threads could use. Triangles mark where the anchor was changed, diamonds "
        "where the guard spoke.",
        html=lanes_key(),
        figures=[lanes_figure(timeline)],
    )


# Learning


def _learning(epochs: Sequence[Epoch]) -> page.PageSection:
    by_epoch = {"title": "epochs", "rangemode": "tozero", **_whole_ticks(epochs)}
    by_time = {"title": "seconds since the first epoch began", "rangemode": "tozero"}
    return page.PageSection(
        title="Learning",
        figures=[
            _curves(epochs, [epoch["epoch"] + 1 for epoch in epochs], by_epoch, hover="epoch %{x}"),
            _curves(epochs, [round(epoch["wall_s"], 3) for epoch in epochs], by_time, hover="%{x:.1f} s"),
        ],
    )


def _curves(epochs: Sequence[Epoch], x: Sequence[float], xaxis: dict[str, Any], *, hover: str) -> page.Figure:
    traces = [_curve("loss", x, [epoch["loss"] for epoch in epochs], _LOSS, hover, yaxis="y")]
    layout: dict[str, Any] = {"xaxis": xaxis, "yaxis": {"title": "training loss"}}
    if any(epoch["eval"] is not None for epoch in epochs):
        traces.append(_curve("evaluation", x, [epoch["eval"] for epoch in epochs], _EVAL, hover, yaxis="y2"))
        layout["yaxis2"] = {"title": "evaluation", **_RIGHT_AXIS}
        layout["margin"] = {"l": 56, "r": 56, "t": 30, "b": 44}
    return page.figure(traces, height=300, **layout)


def _curve(
    name: str, x: Sequence[float], y: Sequence[float | None], colour: str, hover: str, *, yaxis: str
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 40 else "lines",
        "name": name,
        "x": list(x),
        "y": list(y),
        "yaxis": yaxis,
        "line": {"color": colour, "width": 2},
        "marker": {"size": 6},
        "hovertemplate": f"{hover}<br>{name} %{{y:.4g}}<extra></extra>",
    }


# Ranks


def _ranks(ranks: Sequence[RankSummary], epochs: Sequence[Epoch]) -> page.PageSection:
    headers = ("rank", "device", "batches", "samples", "share", "compute", "throttled", "averages", "median average")
    rows = [
        (
            page.swatch(page.rank_colour(rank.rank), f"rank {rank.rank}"),
            rank.device,
            f"{rank.batches:,}",
            f"{rank.samples:,}",
            _percent(rank.share),
            f"{rank.compute_s:,.1f} s",
            f"{rank.throttle_s:,.1f} s" if rank.throttle_s else _UNKNOWN,
            f"{rank.averages:,}" if rank.averages else _UNKNOWN,
            _number(rank.average_ms, ".3g", " ms"),
        )
        for rank in ranks
    ]
    figures = [_shares(epochs, ranks)] if epochs else []
    return page.PageSection(title="Share of samples", html=page.table(headers, rows), figures=figures)


def _share(epoch: Epoch, rank: int) -> float | None:
    """A rank's share of an epoch in percent; None if a resumed run had fewer ranks before."""
    shares = epoch["share_by_rank"]
    return round(100 * shares[rank], 2) if rank < len(shares) else None


def _shares(epochs: Sequence[Epoch], ranks: Sequence[RankSummary]) -> page.Figure:
    numbers = [epoch["epoch"] + 1 for epoch in epochs]
    traces = [
        {
            "type": "bar",
            "name": f"rank {rank.rank} · {rank.device}",
            "x": numbers,
            "y": [_share(epoch, rank.rank) for epoch in epochs],
            "marker": {"color": page.rank_colour(rank.rank)},
            "hovertemplate": f"epoch %{{x}}<br>rank {rank.rank}: %{{y:.1f}} %<extra></extra>",
            **({"width": 0.4} if len(epochs) <= 6 else {}),
        }
        for rank in ranks
    ]
    return page.figure(
        traces,
        height=260,
        barmode="stack",
        bargap=0.1 if len(epochs) <= 60 else 0,
        xaxis={"title": "epochs", **_whole_ticks(epochs)},
        yaxis={"title": "samples", "ticksuffix": " %", "range": [0, 100]},
    )


# Idle time


def _idle(ranks: Sequence[RankSummary]) -> page.PageSection:
    return page.PageSection(
        title="Idle time by cause",
        note="Recorded: the waits that ranks measured themselves, short ones too. Sampled: device below 5 % for at "
        "least 0.5 s, with the cause found from what the rank did then."
        + ("" if any(rank.gaps_s is not None for rank in ranks) else " Nothing was sampled in this run."),
        html=page.key(page.CAUSE_COLOURS),
        figures=[_idle_figure(ranks)],
    )


def _idle_figure(ranks: Sequence[RankSummary]) -> page.Figure:
    views = [(f"rank {rank.rank} · recorded", rank.waits_s) for rank in ranks]
    views += [(f"rank {rank.rank} · sampled", rank.gaps_s) for rank in ranks if rank.gaps_s is not None]
    views.sort()
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": cause,
            "y": [label for label, _ in views],
            "x": [round(seconds.get(cause, 0.0), 3) for _, seconds in views],
            "marker": {"color": page.CAUSE_COLOURS[cause]},
            "hovertemplate": f"%{{y}}<br>{cause}: %{{x:.2f}} s<extra></extra>",
        }
        for cause in ALL_CAUSES
    ]
    return page.figure(
        traces,
        height=90 + 34 * len(views),
        barmode="stack",
        showlegend=False,
        xaxis={"title": "seconds", "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "showgrid": False},
    )


# Numbers


def _whole_ticks(epochs: Sequence[Epoch]) -> dict[str, Any]:
    """Ticks at whole numbers only, for an axis with few epochs."""
    return {"dtick": 1} if len(epochs) <= 20 else {}


def _thinned(epochs: Sequence[Epoch]) -> list[Epoch]:
    """Every n-th epoch of a long run, including the last."""
    step = -(-len(epochs) // _MAX_EPOCHS) if epochs else 1
    return list(epochs[::-1][::step][::-1])


def _number(value: float | None, pattern: str, unit: str = "") -> str:
    return _UNKNOWN if value is None else format(value, pattern) + unit


def _percent(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{100 * value:.1f} %"
