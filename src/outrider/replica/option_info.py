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
    """One option in words; every option is one of `train()` and of `Ddp.builder()`."""

    meaning: str
    """One sentence: for the builder and the docs."""
    details: str = ""
    """More, for the docs only."""
    shown_default: str | None = None
    """The default as the docs show it, where its value does not say it."""
    in_session: bool = False
    """`Session()` takes it as well."""
    on_command_line: bool = True
    """Benchmarks take it with `--set`; not for objects, and not where a benchmark decides it."""
    is_object: bool = False
    """An object or function of the user, not a plain value."""
    holds_code: bool = False
    """Its value may be or contain a function of the user."""
    may_differ: bool = False
    """It need not be equal on all ranks: it says where a rank runs, what its host offers, how one device takes a step,
    or what one rank does at the end of an epoch."""


_KINDS: dict[str, dict[str, Any]] = {
    "option": {},
    "session": {"in_session": True},
    "object": {"is_object": True, "holds_code": True, "on_command_line": False},
}


def _read_infos() -> dict[str, OptionInfo]:
    rows = tomllib.loads(resources.files("outrider.replica").joinpath("options.toml").read_text(encoding="utf-8"))
    return {name: OptionInfo(**_KINDS[row.pop("kind", "option")] | row) for name, row in rows.items()}


OPTION_INFOS = _read_infos()
"""By name, in the order of the docs; a test compares the names with the fields of Recipe and RunConfig."""


def options_where(kind: type, holds: Callable[[OptionInfo], bool]) -> frozenset[str]:
    """Names of the fields of Recipe or RunConfig for which `holds` is true."""
    return frozenset(field.name for field in fields(kind) if holds(OPTION_INFOS[field.name]))
