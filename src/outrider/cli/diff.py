"""`outrider bench diff`: compare two iteration benchmarks, ours or PyTorch's.

Parses, calls, prints; needs no torch. The comparison is on stdout, what makes CI fail on stderr with exit code 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from outrider.bench.diff.compare import Comparison

EPILOG = "Example: outrider bench diff before.json after.json --fail-above 3%"


def diff(
    baseline: Annotated[Path, typer.Argument(help="The file of the benchmark before.")],
    test: Annotated[Path, typer.Argument(help="The file of the benchmark after.")],
    fail_above: Annotated[
        str | None,
        typer.Option("--fail-above", metavar="PERCENT", help="Exit with 1 where p75 is slower by more, beyond chance."),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    is_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with the distributions.")
    ] = None,
) -> None:
    """Compare the iteration times in two files; positive differences are faster."""
    from outrider.bench.diff.compare import compare, parse_percent
    from outrider.bench.iteration.record import read_iterations

    limit = None if fail_above is None else parse_percent(fail_above)
    comparison = compare(read_iterations(baseline), read_iterations(test))
    typer.echo(_text(comparison, is_json=is_json, is_markdown=is_markdown))
    if html is not None:
        _write_page(comparison, html)
    if limit is not None:
        _fail_above(comparison, limit)


def _text(comparison: Comparison, *, is_json: bool, is_markdown: bool) -> str:
    import json

    from outrider.bench.diff.text import document, render, render_markdown

    if is_json:
        return json.dumps(document(comparison), indent=1)
    return render_markdown(comparison) if is_markdown else render(comparison)


def _write_page(comparison: Comparison, path: Path) -> None:
    from outrider.bench.diff.page import write_diff_page
    from outrider.cli.console import say

    say(f"page: {write_diff_page(comparison, path)}")


def _fail_above(comparison: Comparison, limit_percent: float) -> None:
    from outrider.cli.console import EXIT_ERROR, say

    slower = comparison.slower_than(limit_percent)
    for row in slower:
        say(f"slower by more than {limit_percent:g} %: {row.name}, p75 {row.change(75).faster_percent:+.1f} %")
    if slower:
        raise typer.Exit(EXIT_ERROR)
