"""The table of options in words: what each means, and which entry points take it.

An option is a field of Recipe or RunConfig, which hold its type and default and check its value, and a row of
options.toml. Docs, builder, Session, the benchmarks' `--set`, the payload of ranks and the comparison between ranks
follow from both.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionInfo:
    """One option in words; `train()` and `Ddp.builder()` take every option."""

    meaning: str
    """One sentence for the builder and the docs."""
    details: str = ""
    """Further text, only for the docs."""
    shown_default: str | None = None
    """The default as shown in the docs, if its value is not clear by itself."""
    in_session: bool = False
    """Whether `Session()` takes it as well."""
    on_command_line: bool = True
    """Whether benchmarks take it with `--set`; not for objects, nor for values that a benchmark decides."""
    is_object: bool = False
    """Whether it is an object or function of the user, not a plain value."""
    holds_code: bool = False
    """Whether its value may be or contain a function of the user."""
    may_differ: bool = False
    """Whether it may differ between ranks: it says where a rank runs, what its host offers, how one device takes a
    step, or what one rank does at the end of an epoch."""


_KINDS: dict[str, dict[str, Any]] = {
    "option": {},
    "session": {"in_session": True},
    "object": {"is_object": True, "holds_code": True, "on_command_line": False},
}


def _read_infos() -> dict[str, OptionInfo]:
    rows = tomllib.loads(resources.files("outrider.replica").joinpath("options.toml").read_text(encoding="utf-8"))
    return {name: OptionInfo(**_KINDS[row.pop("kind", "option")] | row) for name, row in rows.items()}


OPTION_INFOS = _read_infos()
"""Options by name, in the order of the docs; a test compares the names with the fields of Recipe and RunConfig."""


def options_where(kind: type, holds: Callable[[OptionInfo], bool]) -> frozenset[str]:
    """Names of the fields of Recipe or RunConfig for which `holds` is true."""
    return frozenset(field.name for field in fields(kind) if holds(OPTION_INFOS[field.name]))
