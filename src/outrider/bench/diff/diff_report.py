"""A comparison of iteration benchmarks as text, as Markdown, as JSON and as a web page.

Decides words and layout only; `compare` finds the differences. Called by `outrider bench diff`.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from outrider.bench.diff.compare import PERCENTS, SCHEMA_VERSION, Comparison, DiffRow
from outrider.bench.tables import UNKNOWN, markdown_table, text_table
from outrider.timeline.web_page import RANK_COLOURS, Figure, PageSection, figure, table, write_page

_WIDEST = 44
HEADERS = ("", *(text for percent in PERCENTS for text in (f"p{percent} sec/iter", "ex/sec", "diff")), "verdict")


def render(comparison: Comparison) -> str:
    """For a terminal of any kind; times and examples per second are the test's, per rank."""
    parts = [_settings_text(comparison)]
    for title, rows in _by_model(comparison):
        parts.append(f"{title}\n{text_table(HEADERS, [cells(row) for row in rows])}")
    parts += [f"warning: {warning}" for warning in comparison.warnings]
    return "\n\n".join(parts)


def render_markdown(comparison: Comparison) -> str:
    """For a comment on a change."""
    parts = [markdown_table(("setting", "baseline", "test"), _setting_rows(comparison))]
    for title, rows in _by_model(comparison):
        parts.append(f"### {title}\n\n{markdown_table(HEADERS, [cells(row) for row in rows])}")
    parts += [f"> warning: {warning}" for warning in comparison.warnings]
    return "\n\n".join(parts)


def document(comparison: Comparison) -> dict[str, Any]:
    """For programs; differences are in percent, positive is faster."""
    return {
        "schema_version": SCHEMA_VERSION,
        "baseline": comparison.baseline,
        "test": comparison.test,
        "different_settings": {one.name: [one.baseline, one.test] for one in comparison.different_settings},
        "warnings": list(comparison.warnings),
        "rows": [_row_document(row) for row in comparison.rows],
    }


def summary(row: DiffRow) -> str:
    """The verdict with its evidence."""
    tested = row.test_of_ranks
    words = f"{row.verdict} (p {p_text(row.p_value)}"
    if not row.is_different:
        return f"{words})"
    quicker = tested.quicker_part if row.verdict == "faster" else 1 - tested.quicker_part
    return f"{words}, in {100 * quicker:.0f} % of pairs, {tested.effect} effect)"


def p_text(p_value: float) -> str:
    return "< 0.001" if p_value < 0.001 else f"= {p_value:.3f}"


def _by_model(comparison: Comparison) -> list[tuple[str, list[DiffRow]]]:
    groups = groupby(comparison.rows, key=lambda row: f"{row.model}, batch size {row.batch_size}")
    return [(title, list(rows)) for title, rows in groups]


def _settings_text(comparison: Comparison) -> str:
    rows = _setting_rows(comparison)
    equal = f"{len(comparison.equal_settings)} other settings are equal"
    return f"{text_table(('', 'baseline', 'test'), rows)}\n{equal}"


def _setting_rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    files = ("file", comparison.baseline, comparison.test)
    return [files, *((one.name, _short(one.baseline), _short(one.test)) for one in comparison.different_settings)]


def _short(value: object) -> str:
    """One line; a long one, such as a topology, is cut."""
    text = UNKNOWN if value is None else " ".join(str(value).split())
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def cells(row: DiffRow) -> list[str]:
    """The row of a table under HEADERS."""
    texts = [row.label]
    for percent in PERCENTS:
        change = row.change(percent)
        texts += [
            f"{change.test_s:.4f}",
            f"{row.batch_size / change.test_s:,.0f}",
            f"{change.faster_percent:+.1f}%",
        ]
    return [*texts, summary(row)]


def _row_document(row: DiffRow) -> dict[str, Any]:
    tested = row.test_of_ranks
    changes = {
        f"p{percent}": {
            "baseline_s": row.change(percent).baseline_s,
            "test_s": row.change(percent).test_s,
            "faster_percent": row.change(percent).faster_percent,
        }
        for percent in PERCENTS
    }
    return {
        "model": row.model,
        "batch_size": row.batch_size,
        "ranks": row.test.num_ranks,
        "is_plain": row.test.is_plain,
        **changes,
        "verdict": row.verdict,
        "p_value": row.p_value,
        "method": tested.method,
        "cliffs_delta": tested.cliffs_delta,
        "effect": tested.effect,
        "measurements": [len(row.baseline.measurements), len(row.test.measurements)],
    }


_SIDES = ("baseline", "test")


def write_diff_page(comparison: Comparison, path: Path) -> Path:
    """Write the page, and what it needs beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_page(
        path.parent,
        path.name,
        "Iteration times compared",
        [
            _overview(comparison),
            *(PageSection(title=row.name, note=summary(row), figures=[_distributions(row)]) for row in comparison.rows),
        ],
        lead=f"baseline {comparison.baseline}, test {comparison.test}; positive differences are faster",
    )


def _overview(comparison: Comparison) -> PageSection:
    rows = [[row.model, *cells(row)] for row in comparison.rows]
    note = " ".join(f"Warning: {warning}." for warning in comparison.warnings)
    return PageSection(title="All rows", note=note, html=table(["model", "world", *HEADERS[1:]], rows))


def _distributions(row: DiffRow) -> Figure:
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
