"""Runs whose steps are captured: what the timeline says, checkpoints, and windows measured without waiting."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.timeline.recorder import Event

Outcomes = dict[str, Any]


@pytest.fixture(scope="module")
def outcomes(train_all: Callable[..., Outcomes]) -> Outcomes:
    captured = {"execution": "graph", "devices": "cuda:0", "epochs": 2}
    return train_all(
        graph_async={**captured, "policy": "async"},
        graph_cadence={**captured, "policy": "cadence"},
        graph_sync={**captured, "policy": "sync", "checkpoint_every": 1},
        graph_balanced={**captured, "policy": "balanced"},
        eager_async={**captured, "policy": "async", "execution": "eager"},
        eager_sync={**captured, "policy": "sync", "execution": "eager"},
    )


def events(run_dir: Path, kind: str) -> list[Event]:
    timeline = json.loads((run_dir / "timeline.json").read_text())
    return [event for event in timeline["events"] if event["kind"] == kind]


@pytest.mark.parametrize("name", ["graph_async", "graph_cadence", "graph_sync", "graph_balanced"])
def test_the_timeline_says_that_steps_were_captured_and_why(outcomes: Outcomes, name: str) -> None:
    assert outcomes[name].error is None
    (event,) = events(outcomes[name].run_dir, "execution")
    assert event["value"] == "graph"
    assert (
        event["reason"] == f"a captured step takes {event['graph_ms']:.2f} ms, an eager one {event['eager_ms']:.2f} ms"
    )


@pytest.mark.parametrize(("captured", "eager"), [("graph_async", "eager_async"), ("graph_sync", "eager_sync")])
def test_captured_runs_learn_what_eager_ones_do(outcomes: Outcomes, captured: str, eager: str) -> None:
    losses = [epoch.loss for epoch in outcomes[captured].epochs]
    assert losses == pytest.approx([epoch.loss for epoch in outcomes[eager].epochs], rel=1e-3)


def test_a_captured_run_goes_on_from_its_checkpoint(outcomes: Outcomes, train_all: Callable[..., Outcomes]) -> None:
    straight = outcomes["graph_sync"]
    (taken,) = (straight.run_dir / "checkpoints").glob("epoch00001-*")
    options = {"execution": "graph", "devices": "cuda:0", "policy": "sync", "epochs": 2, "resume": taken}
    went_on = train_all(went_on=options)["went_on"]
    assert went_on.error is None
    assert [epoch.loss for epoch in went_on.epochs][-1:] == pytest.approx([straight.epochs[1].loss], rel=1e-4)


@pytest.mark.parametrize("name", ["graph_async", "graph_cadence"])
def test_windows_have_their_compute_time(outcomes: Outcomes, name: str) -> None:
    windows = events(outcomes[name].run_dir, "window")
    assert windows
    assert all(window["compute_ms"] > 0 for window in windows)
