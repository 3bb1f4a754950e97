"""Plain text tables: the same on a terminal, without colour and in a pipe.

Decides alignment only; the caller decides the content. Called by the demo and the benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence

_GAP = "  "
UNKNOWN = "-"


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, num_names: int = 1) -> str:
    """Lines of aligned columns: the first `num_names` to the left, the numbers after them to the right."""
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    rule = ["-" * width for width in widths]
    return "\n".join(_line(cells, widths, num_names) for cells in (headers, rule, *rows))


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int], num_names: int) -> str:
    names = [cell.ljust(width) for cell, width in zip(cells[:num_names], widths[:num_names], strict=True)]
    numbers = [cell.rjust(width) for cell, width in zip(cells[num_names:], widths[num_names:], strict=True)]
    return _GAP.join(names + numbers)


def number(value: float | None, pattern: str) -> str:
    """A value in the pattern of `format`, such as ".2f"; a dash if it is unknown."""
    return UNKNOWN if value is None else format(value, pattern)
