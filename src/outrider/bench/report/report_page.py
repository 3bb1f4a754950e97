"""The report as a web page: the same tables as the text, and charts of every model.

Decides which charts it contains; `timeline.web_page` decides how pages look. Imports no torch.
Called by `bench report --html`.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.bench.measures import after_warm_up
from outrider.bench.report import markdown as words
from outrider.bench.report import model_tables as tables
from outrider.bench.report.charts import efficiency_figure, idle_figure, learning_figures, learning_key, share_figure
from outrider.bench.report.markdown import Report
from outrider.bench.report.model_tables import ReportTable
from outrider.bench.suite.groups import Group
from outrider.bench.suite.suite_summary import ModeSummary
from outrider.timeline.web_page import (
    Markup,
    PageSection,
    table,
    write_page,
)

NAME = "report.html"


def write_report_page(report: Report, folder: Path) -> Path:
    """Write `report.html` into the folder, with plotly's script beside it."""
    sections = [
        PageSection(title="Best mode per model", html=_table(words.overview(report))),
        *(section for group, summaries in report.pairs for section in _model_sections(group, summaries)),
        PageSection(
            title="Where a mode is worse than one device alone",
            html=_list(words.worse_sentences(report), otherwise="Nowhere in these runs, as far as they can tell."),
        ),
        PageSection(title="Incomplete runs", html=_list(words.incomplete_sentences(report), otherwise="None.")),
        PageSection(title="Runs", html=_runs(report, folder)),
        PageSection(title="Notes", html=_list(words.notes(report), otherwise="")),
        PageSection(title="Reproduce", html=Markup(f"<pre>{html.escape(chr(10).join(words.reproduce(report)))}</pre>")),
    ]
    return write_page(folder, NAME, "Benchmark report", sections, lead=words.lead(report), facts=_facts(report))


def _facts(report: Report) -> list[tuple[str, str]]:
    first = report.environments[0]
    told = [(name.replace("_", " "), words.fact(first[name])) for name in ("cpu", "num_cores", "gpus", "torch")]
    return [*told, ("commit", ", ".join(report.commits) or "-")]


def _model_sections(group: Group, summaries: Mapping[str, ModeSummary]) -> list[PageSection]:
    waiting = [tables.averages_table(summaries), tables.idle_table(summaries), tables.memory_table(summaries)]
    return [
        PageSection(
            title=group.name,
            note=words.conditions(group, summaries),
            html=_table(tables.results_table(group, summaries)),
            figures=[efficiency_figure(summaries), share_figure(summaries)] if group.has_timed else [],
        ),
        PageSection(
            title=f"{group.name}: learning",
            html=Markup(_tables([tables.quality_table(group, summaries)]) + learning_key(group)),
            figures=learning_figures(group),
        ),
        PageSection(
            title=f"{group.name}: waiting",
            html=_tables(waiting),
            figures=[idle_figure(summaries)] if group.has_timed else [],
        ),
    ]


# Tables


def _runs(report: Report, folder: Path) -> Markup:
    runs = [run for group in report.groups for run in group.runs]
    rows = [
        [
            _link(run.folder, folder),
            f"{len(after_warm_up(run.epochs))} + warm-up" if run.case.is_timed else "not timed",
            run.case.key,
            _link(run.folder / "timeline.html", folder, text="timeline"),
        ]
        for run in runs
    ]
    return table(("run", "epochs counted", "key", "timeline"), rows)


def _link(target: Path, folder: Path, *, text: str | None = None) -> str:
    """A link, if its target exists."""
    place = os.path.relpath(target, folder)
    if not target.exists():
        return "-" if text else place
    return Markup(f'<a href="{html.escape(place, quote=True)}">{html.escape(text or place)}</a>')


def _table(one: ReportTable) -> Markup:
    note = Markup(f"<p>{html.escape(one.note)}</p>") if one.note else ""
    return Markup(f"{table(one.headers, one.rows)}{note}")


def _tables(some: Sequence[ReportTable]) -> Markup:
    shown = [one for one in some if one.rows]
    return Markup("".join(f"<p><strong>{html.escape(one.title)}</strong></p>{_table(one)}" for one in shown))


def _list(sentences: Sequence[str], *, otherwise: str) -> Markup:
    if not sentences:
        return Markup(f"<p>{html.escape(otherwise)}</p>")
    return Markup("<ul>" + "".join(f"<li>{html.escape(one.replace('`', ''))}</li>" for one in sentences) + "</ul>")
