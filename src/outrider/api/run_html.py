"""Shows a run in a notebook as a small piece of HTML: verdict, loss curve and each device's share.

Decides what is shown and how. The HTML has no scripts, loads nothing, and stays small however long the run is. Called
by run handles and sessions when they are the last value in a cell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from outrider.api.run_lines import end_line
from outrider.record.run_folder import shown_path
from outrider.timeline.timeline_files import read_record
from outrider.watch.run_reader import RunReader
from outrider.watch.run_view import verdict_of

_WIDTH, _HEIGHT = 420, 110
_MAX_POINTS = 200
_MAX_RANKS = 16
_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2")
_GREY = "opacity:.65"


def run_html(folder: Path) -> str:
    """The HTML of the run in this folder, which may still be running."""
    record = read_record(folder) or {}
    epochs: list[dict[str, Any]] = record.get("epochs") or []
    parts = [
        f'<div style="font-weight:600">{escape(_verdict(folder))}</div>',
        _curve([epoch["loss"] for epoch in epochs]) if len(epochs) > 1 else "",
        _shares(record.get("devices") or [], epochs[-1]["share_by_rank"]) if epochs else "",
        f'<div style="{_GREY}">{escape(_numbers(folder, epochs))}</div>',
    ]
    return f'<div style="font:13px sans-serif;max-width:{_WIDTH}px">{"".join(parts)}</div>'


def _verdict(folder: Path) -> str:
    """The sentence of the live page."""
    reader = RunReader(folder)
    reader.refresh()
    return verdict_of(reader, reader.now_s()).sentence


def _numbers(folder: Path, epochs: Sequence[dict[str, Any]]) -> str:
    if not epochs:
        return f"no finished epoch yet; {shown_path(folder)}"
    last = epochs[-1]
    words = [f"epoch {last['epoch'] + 1}", f"loss {_number(last['loss'])}"]
    if last.get("eval") is not None:
        words.append(f"evaluation {_number(last['eval'])}")
    words.append(end_line(folder) or f"{last['samples_per_s']:,.0f} samples/s; {shown_path(folder)}")
    return ", ".join(words[:-1]) + "; " + words[-1]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _curve(losses: Sequence[float | None]) -> str:
    """The loss of each epoch as a line; values that are not finite are gaps."""
    kept = _thinned(losses)
    known = [loss for _, loss in kept if loss is not None and math.isfinite(loss)]
    if not known:
        return ""
    low, high = min(known), max(known)
    span, last = (high - low) or 1.0, max(1, len(losses) - 1)
    pieces: list[list[str]] = [[]]
    for place, loss in kept:
        if loss is None or not math.isfinite(loss):
            pieces.append([])
            continue
        x, y = 8 + place / last * (_WIDTH - 16), 10 + (high - loss) / span * (_HEIGHT - 30)
        pieces[-1].append(f"{x:.1f},{y:.1f}")
    drawn = "".join(_line(piece) for piece in pieces if piece)
    axis = f'<text x="8" y="{_HEIGHT - 4}">loss {low:.4g} to {high:.4g}, epochs 1 to {len(losses)}</text>'
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="loss of each epoch" '
        f'font-family="sans-serif" font-size="11" fill="currentColor">{drawn}{axis}</svg>'
    )


def _line(points: Sequence[str]) -> str:
    if len(points) == 1:
        x, y = points[0].split(",")
        return f'<circle cx="{x}" cy="{y}" r="3" fill="{_COLORS[0]}"/>'
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{_COLORS[0]}" stroke-width="2"/>'


def _thinned(losses: Sequence[float | None]) -> list[tuple[int, float | None]]:
    every = -(-len(losses) // _MAX_POINTS)
    kept = list(enumerate(losses))[::every]
    # Always keep the newest value, because readers look for it.
    return kept if kept[-1][0] == len(losses) - 1 else [*kept, (len(losses) - 1, losses[-1])]


def _shares(devices: Sequence[str], shares: Sequence[float]) -> str:
    """Each device's share of the samples in the last epoch, as one bar."""
    bars, words, left = [], [], 0.0
    for rank, share in enumerate(shares[:_MAX_RANKS]):
        color = _COLORS[rank % len(_COLORS)]
        width = share * (_WIDTH - 16)
        bars.append(f'<rect x="{8 + left:.1f}" y="0" width="{width:.1f}" height="12" fill="{color}"/>')
        device = escape(devices[rank]) if rank < len(devices) else "?"
        words.append(f'<span style="color:{color}">&#9632;</span> rank {rank} ({device}) {share:.0%}')
        left += width
    more = len(shares) - _MAX_RANKS
    words += [f"and {more} more"] if more > 0 else []
    svg = f'<svg width="{_WIDTH}" height="12" role="img" aria-label="share of each rank">{"".join(bars)}</svg>'
    return f"{svg}<div>{', '.join(words)}</div>"
