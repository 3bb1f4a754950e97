"""The values of the option `trackers`: names, instances, and lists of them.

Decides what is accepted. `api/options.py` reads the option with it; rank 0 opens what it names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from outrider.errors import ConfigError, one_of
from outrider.trackers.csv_tracker import CsvTracker
from outrider.trackers.mlflow_tracker import MlflowTracker
from outrider.trackers.tensorboard_tracker import TensorBoardTracker
from outrider.trackers.tracker import Tracker, name_of
from outrider.trackers.trackio_tracker import TrackioTracker
from outrider.trackers.wandb_tracker import WandbTracker

TrackerName = Literal["csv", "tensorboard", "wandb", "trackio", "mlflow"]
TRACKERS: dict[str, type[Tracker]] = {
    kind.name: kind for kind in (CsvTracker, TensorBoardTracker, WandbTracker, TrackioTracker, MlflowTracker)
}


def as_trackers(value: Any) -> tuple[str | Tracker, ...]:
    """The option as RunConfig keeps it: a tuple, without anything that is no tracker."""
    if value is None:
        return ()
    given = [value] if isinstance(value, str | Tracker) or not isinstance(value, Sequence) else list(value)
    for one in given:
        _check(one)
    names = [one if isinstance(one, str) else name_of(one) for one in given]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"the tracker {twice!r} is given twice", hint="a run has at most one tracker of each name")
    return tuple(given)


def _check(one: Any) -> None:
    if isinstance(one, Tracker) or (isinstance(one, str) and one in TRACKERS):
        return
    if isinstance(one, str):
        raise ConfigError(f"unknown tracker {one!r}", hint=one_of(one, TRACKERS, what="trackers"))
    if isinstance(one, type) and issubclass(one, Tracker):
        raise ConfigError(
            f"trackers has the class {one.__name__}, and needs a tracker", hint=f"pass {one.__name__}(), with brackets"
        )
    raise ConfigError(
        f"trackers must be names, trackers or a list of them, got {type(one).__name__}",
        hint=f'pass a name such as "csv" (one of {", ".join(TRACKERS)}), or an object of your own class that derives '
        "from outrider.trackers.Tracker",
    )


def make_trackers(given: Sequence[str | Tracker]) -> list[Tracker]:
    return [TRACKERS[one]() if isinstance(one, str) else one for one in given]
