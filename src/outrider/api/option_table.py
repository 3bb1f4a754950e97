"""The table of options: name, type, default, meaning, and which entry points take each.

Decides nothing: it joins the words of `OPTION_INFOS`, the defaults of Recipe and RunConfig, and the types of `Options`.
Read by the benchmarks' `--set`, by docs/tables.py, and by the test that compares builder, Session and docs with it.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, get_type_hints

from outrider.api.options import Options
from outrider.record.run_config import RunConfig
from outrider.replica.option_info import OPTION_INFOS, OptionInfo
from outrider.replica.recipe import Recipe

REQUIRED = ("model", "optimizer", "step", "dataset")
"""Arguments of `train()` and of the builder, not options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One row."""

    name: str
    type: Any
    """The type that users pass; Recipe and RunConfig may store another one."""
    default: Any
    """MISSING if the option is required."""
    info: OptionInfo
    is_of_lab: bool
    """Whether `lab()` takes the option too, because it is about the model and its training, not about devices."""


def _rows(kind: type) -> list[Option]:
    types = get_type_hints(Options)
    return [
        Option(
            name=field.name,
            type=types[field.name],
            default=field.default,
            info=OPTION_INFOS[field.name],
            is_of_lab=kind is Recipe,
        )
        for field in fields(kind)
        if field.name not in REQUIRED
    ]


_BY_NAME = {row.name: row for kind in (Recipe, RunConfig) for row in _rows(kind)}
OPTIONS = {name: _BY_NAME[name] for name in OPTION_INFOS if name in _BY_NAME}
SESSION_OPTIONS = tuple(name for name, row in OPTIONS.items() if row.info.in_session)
COMMAND_LINE_OPTIONS = tuple(name for name, row in OPTIONS.items() if row.info.on_command_line)


def shown_default(row: Option) -> str:
    """The default as the docs show it."""
    if row.info.shown_default is not None:
        return row.info.shown_default
    if row.default is MISSING:
        return "required"
    if row.default is None:
        return "none"
    if isinstance(row.default, bool):
        return "on" if row.default else "off"
    return f"`{row.default}`" if isinstance(row.default, str) else f"{row.default:g}"
