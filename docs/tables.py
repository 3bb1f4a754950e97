"""Writes the tables of policies, backends and options into the guides: `python docs/tables.py`.

The text comes from the declarations in the package; a test compares it with the guides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from outrider.api.option_table import OPTIONS, Option, shown_default
from outrider.average.transport.backend_table import BACKEND_TABLE
from outrider.policy.policies import POLICY_TABLE

GUIDES = ("training.md",)
FOLDER = Path(__file__).parent
_REGION = re.compile(r"(<!-- table: (\w+), written by docs/tables.py -->\n).*?(<!-- end of table -->\n)", re.DOTALL)


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (headers, ["---"] * len(headers), *rows))


def policies() -> str:
    rows = [[f"`{spec.name}`", spec.summary, spec.choose_when] for spec in POLICY_TABLE.values() if spec.averages]
    return _table(("policy", "what happens", "choose it when"), rows)


def backends() -> str:
    rows = [[f"`{spec.name}`", spec.summary, spec.choose_when] for spec in BACKEND_TABLE.values()]
    return _table(("backend", "tensors are", "`auto` chooses it when"), rows)


def options() -> str:
    rows = [[f"`{row.name}`", shown_default(row), _meaning(row), _takers(row)] for row in OPTIONS.values()]
    return _table(("option", "default", "meaning", "also in"), rows)


def _meaning(row: Option) -> str:
    return f"{row.info.meaning} {row.info.details}".strip()


def _takers(row: Option) -> str:
    takers = {"`lab`": row.is_of_lab, "`Session`": row.info.in_session, "`--set`": row.info.on_command_line}
    return ", ".join(name for name, takes in takers.items() if takes)


TABLES = {"policies": policies, "backends": backends, "options": options}


def written(guide: str) -> str:
    """The text of a guide with its tables as they should be."""
    return _REGION.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], guide)


if __name__ == "__main__":
    for name in GUIDES:
        path = FOLDER / name
        path.write_text(written(path.read_text()))
