"""Sizes of memory as users write them: 8GiB, 512MiB, 24GB.

Decides the spelling only. Called by device specs.
"""

from __future__ import annotations

import re

_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6, "B": 1}
"""Larger units first: a size is written in the largest that divides it."""
_SIZE = re.compile(rf"(?P<number>\d+(\.\d+)?)\s*(?P<unit>{'|'.join(_UNITS)})", re.IGNORECASE)
_SPELLINGS = {unit.lower(): unit for unit in _UNITS}


def parse_memory(text: str) -> int | None:
    """Bytes; None if the text is no size."""
    match = _SIZE.fullmatch(text.strip())
    return None if match is None else round(float(match["number"]) * _UNITS[_SPELLINGS[match["unit"].lower()]])


def memory_text(num_bytes: int) -> str:
    """The same size as a user would write it."""
    unit = next(unit for unit, size in _UNITS.items() if num_bytes % size == 0)
    return f"{num_bytes // _UNITS[unit]}{unit}"
