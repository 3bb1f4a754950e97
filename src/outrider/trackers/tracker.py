"""The protocol of trackers: what a tracker is told about a run, and when.

Decides nothing about a library. `rank/run_trackers.py` calls trackers on rank 0; users may write their own.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from outrider.errors import MissingExtraError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """A run as its trackers see it."""

    name: str
    """The name of the run folder."""
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options, devices and versions: text, numbers, and lists of them."""
    step: int = 0
    """The step that the run begins at: 0, or that of the checkpoint from which it resumes."""
    earlier: Mapping[str, str] | None = None
    """What `start` of this tracker returned in the run that this one continues; None in a new run."""


class Tracker(ABC):
    """Derive from this for a tracker of your own. An exception in it ends the tracker, not the run.

    It must be possible to pickle a tracker before `start`: `train()` sends it to the process of rank 0.
    """

    name: ClassVar[str] = ""
    """How warnings and `config.json` call it; the name of the class by default."""
    package: ClassVar[str | None] = None
    """The package that it needs, which is also the name of Outrider's extra."""

    @abstractmethod
    def start(self, run: TrackedRun) -> Mapping[str, str] | None:
        """Open the run. The result, such as an id, is given to `start` of a resumed run as `run.earlier`."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write values by name; names of one rank begin with `rank<i>/`. Values that are not known are left out."""

    @abstractmethod
    def finish(self, status: str) -> None:
        """End the run: "finished", "stopped", "interrupted" or "failed". A run that was killed does not come here."""


def name_of(tracker: Tracker) -> str:
    return tracker.name or type(tracker).__name__


def refuse_missing(tracker: Tracker) -> None:
    """Raise if the library of a tracker is not installed."""
    package = tracker.package
    if package is not None and importlib.util.find_spec(package) is None:
        raise MissingExtraError(
            f"the tracker {name_of(tracker)!r} needs {package}, which is not installed",
            hint=f'pip install "outrider[{package}]", or leave this tracker out',
        )
