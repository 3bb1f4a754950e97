"""A comparison of iteration benchmarks as text, as Markdown and as JSON.

Decides words and layout only; what differs is decided in diff. Called by `outrider bench diff`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from outrider.bench.diff.compare import PERCENTS, SCHEMA_VERSION, Comparison, Row, Setting
from outrider.bench.tables import UNKNOWN, text_table

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
    parts = [_markdown_table(("setting", "baseline", "test"), _setting_rows(comparison))]
    for title, rows in _by_model(comparison):
        parts.append(f"### {title}\n\n{_markdown_table(HEADERS, [cells(row) for row in rows])}")
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


def summary(row: Row) -> str:
    """The verdict with what it rests on."""
    tested = row.test_of_ranks
    words = f"{row.verdict} (p {p_text(row.p_value)}"
    if not row.is_different:
        return f"{words})"
    quicker = tested.quicker_part if row.verdict == "faster" else 1 - tested.quicker_part
    return f"{words}, in {100 * quicker:.0f} % of pairs, {tested.effect} effect)"


def p_text(p_value: float) -> str:
    return "< 0.001" if p_value < 0.001 else f"= {p_value:.3f}"


def _by_model(comparison: Comparison) -> list[tuple[str, list[Row]]]:
    groups = groupby(comparison.rows, key=lambda row: f"{row.model}, batch size {row.batch_size}")
    return [(title, list(rows)) for title, rows in groups]


def _settings_text(comparison: Comparison) -> str:
    rows = _setting_rows(comparison)
    equal = f"{len(comparison.equal_settings)} other settings are equal"
    return f"{text_table(('', 'baseline', 'test'), rows)}\n{equal}"


def _setting_rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    files = ("file", comparison.baseline, comparison.test)
    return [files, *(_setting_row(one) for one in comparison.different_settings)]


def _setting_row(one: Setting) -> tuple[str, str, str]:
    return one.name, _short(one.baseline), _short(one.test)


def _short(value: object) -> str:
    """One line; a long one, such as a topology, is cut."""
    text = UNKNOWN if value is None else " ".join(str(value).split())
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def cells(row: Row) -> list[str]:
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


def _markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _row_document(row: Row) -> dict[str, Any]:
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
