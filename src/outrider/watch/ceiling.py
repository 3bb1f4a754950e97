"""Finds the ceiling of a run: the rate of the newest run beside it that did the same work with policy `independent`.

Without averages no rank waits for another: only a policy that leaves a device out may be faster. Called by the catalog
for the view.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import DataError
from outrider.timeline.same_work import has_same_steps
from outrider.timeline.timeline_files import RECORD, read_record
from outrider.watch.followed_file import modified_s

POLICY = "independent"
HOLDS_S = 20.0
"""So long a search is not repeated: a folder may hold hundreds of runs."""
MAX_RUNS = 200
_HEAD_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the devices do without averages."""

    run: str
    rate: float


class CeilingSearch:
    """Looks through the runs of one folder, now and then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, tuple[float, Ceiling | None]] = {}

    def of(self, name: str, record: Mapping[str, Any]) -> Ceiling | None:
        """The ceiling of the run of this name; None where no other run tells."""
        if record.get("policy") == POLICY or record.get("parameters") is None:
            return None
        searched_s, found = self._found.get(name, (-HOLDS_S, None))
        if time.monotonic() - searched_s >= HOLDS_S:
            found = self._search(record)
            self._found[name] = (time.monotonic(), found)
        return found

    def _search(self, record: Mapping[str, Any]) -> Ceiling | None:
        candidates = sorted(self._folder.glob(f"*/{RECORD}"), key=modified_s, reverse=True)[:MAX_RUNS]
        for path in candidates:
            if not _may_be_one(path):
                continue
            try:
                other = read_record(path.parent) or {}
            except DataError:
                continue
            rate = (other.get("totals") or {}).get("samples_per_s")
            if other.get("policy") == POLICY and rate and has_same_steps(record, other):
                return Ceiling(run=path.parent.name, rate=float(rate))
        return None


def _may_be_one(path: Path) -> bool:
    """Told by the first lines: records of long runs are large."""
    try:
        with path.open("rb") as file:
            return POLICY.encode() in file.read(_HEAD_BYTES)
    except OSError:
        return False
