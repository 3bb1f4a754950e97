"""Web pages with charts that work from disk without a network: template, style, and the shared script.

Decides how pages look and where plotly.js is stored; the caller decides the content. Called by the pages of timelines,
reports and diffs. A figure is a plain dict, so only plotly's script is needed.
"""

from __future__ import annotations

import html
import importlib.util
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.timeline.timeline_files import explained, finite, write_text

SCRIPT = "plotly.min.js"
HINT = "pip install 'outrider[report]'"
_TEMPLATE = "page.html.jinja"

Figure = dict[str, Any]
"""`data` and `layout` as plotly.js expects them."""

INK, QUIET, LINE = "#1f2933", "#616e7c", "#e4e7eb"
RANK_COLOURS = ("#2f6fb7", "#e07b39", "#3c9d6b", "#8d5cb5", "#c2485f", "#2a9fae", "#a07c2c", "#6b7785")
"""One colour per rank, the same in every chart."""
CAUSE_COLOURS = {
    "startup": "#9aa5b1",
    "epoch boundary": "#5f7486",
    "average": "#e2a72e",
    "rest": "#b7c4a1",
    "data": "#a463b8",
    "evaluation": "#35a79c",
    "unexplained": "#d64545",
}
"""One colour per cause of a wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSection:
    """A part of a page: a title, a note in plain text, safe markup (see `table`), and figures side by side."""

    title: str
    note: str = ""
    html: str = ""
    figures: Sequence[Figure] = ()


def write_page(
    folder: Path,
    name: str,
    title: str,
    sections: Sequence[PageSection],
    *,
    lead: str = "",
    facts: Sequence[tuple[str, str]] = (),
    footer: str = "",
) -> Path:
    """Write `folder/name`, and plotly.js if a section has a figure; `facts` are labels and values."""
    figures = [figure for section in sections for figure in section.figures]
    script = plotly_script(folder) if figures else None
    text = _template().render(
        title=title,
        lead=lead,
        facts=facts,
        sections=_numbered(sections),
        footer=footer,
        script=script,
        figures=script_json(figures),
    )
    write_text(folder / name, text)
    return folder / name


def has_plotly() -> bool:
    """Whether charts can be drawn here."""
    return _installed_script() is not None


def plotly_script(folder: Path) -> str:
    """Put plotly.js into the folder, once for all its pages; returns the `src` for the script element."""
    installed = _installed_script()
    if installed is None:
        raise ConfigError("charts need plotly, which is not installed", hint=HINT)
    target = folder / SCRIPT
    with explained(target):
        if not target.exists() or target.stat().st_size != installed.stat().st_size:
            _put(installed, target)
    return SCRIPT


def figure(data: Iterable[Mapping[str, Any]], *, title: str = "", height: int = 340, **layout: Any) -> Figure:
    """Create a figure in the common style; `layout` is merged into it, axis by axis."""
    whole: dict[str, Any] = {
        "height": height,
        "font": {"family": "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif", "size": 12, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 56, "r": 24, "t": 44 if title else 24, "b": 44},
        "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
        "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": LINE, "font": {"color": INK}},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#9aa5b1", "activecolor": INK},
        "colorway": list(RANK_COLOURS),
        "bargap": 0.25,
    }
    if title:
        whole["title"] = {"text": title, "font": {"size": 14}, "x": 0, "xref": "paper", "y": 0.98, "yanchor": "top"}
    whole.update({name: axis(**value) if _is_axis(name) else value for name, value in layout.items()})
    return {"data": [dict(trace) for trace in data], "layout": whole}


def axis(title: str = "", **options: Any) -> dict[str, Any]:
    """Create an axis in the common style."""
    style = {"gridcolor": LINE, "linecolor": "#cbd2d9", "zeroline": False, "automargin": True, "ticks": ""}
    named = {"title": {"text": title, "standoff": 8, "font": {"size": 12, "color": QUIET}}} if title else {}
    return style | named | options


def rank_colour(rank: int) -> str:
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def swatch(colour: str, text: str) -> Markup:
    """A name after a patch of its colour."""
    return Markup(f'<span class="swatch" style="background:{html.escape(colour)}"></span>{html.escape(text)}')


def key(colours: Mapping[str, str]) -> Markup:
    """The legend of a figure as a line that wraps, because plotly's legend does not fit narrow windows."""
    entries = "".join(f"<span>{swatch(colour, name)}</span>" for name, colour in colours.items())
    return Markup(f'<div class="key">{entries}</div>')


class Markup(str):
    """Text that already is HTML."""

    __slots__ = ()


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """Create a table; cells are escaped unless they are Markup."""
    head = "".join(f"<th>{_cell(text)}</th>" for text in headers)
    body = "".join("<tr>" + "".join(f"<td>{_cell(text)}</td>" for text in row) + "</tr>" for row in rows)
    return Markup(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def script_json(value: Any) -> str:
    """Encode JSON so that it cannot end the surrounding script element; NaN and infinities become null."""
    text = json.dumps(finite(value), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _cell(text: str) -> str:
    return text if isinstance(text, Markup) else html.escape(text)


def _is_axis(name: str) -> bool:
    return name.rstrip("0123456789") in ("xaxis", "yaxis")


def _numbered(sections: Sequence[PageSection]) -> list[dict[str, Any]]:
    """The sections, with the index of each figure in the page's list of figures."""
    numbered, num_before = [], 0
    for section in sections:
        figures = [
            {"index": num_before + i, "height_px": one["layout"].get("height", 340)}
            for i, one in enumerate(section.figures)
        ]
        num_before += len(figures)
        numbered.append({"title": section.title, "note": section.note, "html": section.html, "figures": figures})
    return numbered


def load_template_engine() -> None:
    """Import the template engine, which is otherwise imported with the first page."""
    import jinja2  # noqa: F401


def _template() -> Any:
    import jinja2

    text = resources.files(__package__ or "outrider.timeline").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(text)


def _installed_script() -> Path | None:
    # Locate plotly without importing it, because the import takes longer than writing a page.
    spec = importlib.util.find_spec("plotly")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / "package_data" / SCRIPT
        if path.is_file():
            return path
    return None


def _put(installed: Path, target: Path) -> None:
    """Create a hard link if the file system allows it, because copies of 5 MB per run would add up over a sweep."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        try:
            os.link(installed, temporary)
        except OSError:
            shutil.copyfile(installed, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
