"""A comparison of iteration benchmarks as a web page: the two distributions of every row, and the table.

Decides what is drawn; how pages look is the timeline's page. Called by `outrider bench diff --html`.
"""

from __future__ import annotations

from pathlib import Path

from outrider.bench.diff.compare import Comparison, Row
from outrider.bench.diff.text import HEADERS, cells, summary
from outrider.timeline.page import RANK_COLOURS, Figure, Section, figure, table, write_page

_SIDES = ("baseline", "test")


def write_diff_page(comparison: Comparison, path: Path) -> Path:
    """Write the page, and what it needs beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_page(
        path.parent,
        path.name,
        "Iteration times compared",
        [_overview(comparison), *(_section(row) for row in comparison.rows)],
        lead=f"baseline {comparison.baseline}, test {comparison.test}; positive differences are faster",
    )


def _overview(comparison: Comparison) -> Section:
    rows = [[row.model, *cells(row)] for row in comparison.rows]
    note = " ".join(f"Warning: {warning}." for warning in comparison.warnings)
    return Section(title="All rows", note=note, html=table(["model", "world", *HEADERS[1:]], rows))


def _section(row: Row) -> Section:
    return Section(title=row.name, note=summary(row), figures=[_distributions(row)])


def _distributions(row: Row) -> Figure:
    """Every measurement as a point beside the box of its side: few samples stay few."""
    return figure(
        [
            {
                "type": "box",
                "name": side,
                "x": [1e3 * time_s for time_s in timing.measurements],
                "boxpoints": "all",
                "jitter": 0.6,
                "pointpos": 0,
                "marker": {"color": colour, "size": 4, "opacity": 0.6},
                "orientation": "h",
            }
            for side, timing, colour in zip(_SIDES, (row.baseline, row.test), RANK_COLOURS, strict=False)
        ],
        height=260,
        showlegend=False,
        xaxis={"title": "ms per iteration"},
    )
