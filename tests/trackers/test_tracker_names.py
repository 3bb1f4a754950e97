"""What the option `trackers` takes, and what it refuses."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import outrider
from outrider.trackers import CsvTracker, WandbTracker
from outrider.trackers.tracker import refuse_missing
from outrider.trackers.tracker_names import TRACKERS, as_trackers, make_trackers


def test_names_instances_and_lists_are_taken() -> None:
    csv = CsvTracker()
    assert as_trackers(None) == ()
    assert as_trackers("wandb") == ("wandb",)
    assert as_trackers(csv) == (csv,)
    assert as_trackers([csv, "tensorboard"]) == (csv, "tensorboard")


def test_every_name_makes_its_tracker() -> None:
    assert [type(one).name for one in make_trackers(tuple(TRACKERS))] == list(TRACKERS)


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ("tensorbord", "unknown tracker 'tensorbord'", "did you mean tensorboard? trackers are csv, tensorboard, "),
        (CsvTracker, "trackers has the class CsvTracker, and needs a tracker", "pass CsvTracker(), with brackets"),
        (["csv", 3], "trackers must be names, trackers or a list of them, got int", 'pass a name such as "csv"'),
        ({"csv": 1}, "trackers must be names, trackers or a list of them, got dict", 'pass a name such as "csv"'),
        (print, "trackers must be names, trackers or a list of them, got builtin_function_or_method", "pass a name"),
        (["wandb", WandbTracker()], "the tracker 'wandb' is given twice", "a run has at most one tracker of each name"),
    ],
)
def test_everything_else_is_refused(given: Any, message: str, hint: str) -> None:
    with pytest.raises(outrider.ConfigError) as caught:
        as_trackers(given)
    assert caught.value.message == message
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(hint)


def test_a_missing_library_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(outrider.ConfigError) as caught:
        refuse_missing(WandbTracker())
    assert caught.value.message == "the tracker 'wandb' needs wandb, which is not installed"
    assert caught.value.hint == 'pip install "outrider[wandb]", or leave this tracker out'


def test_making_trackers_imports_no_library() -> None:
    libraries = {kind.package for kind in TRACKERS.values()} - {None}
    before = libraries & sys.modules.keys()
    make_trackers(tuple(TRACKERS))
    assert libraries & sys.modules.keys() == before
