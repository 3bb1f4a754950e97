"""fp16 with loss scaling on a CUDA device: it learns what fp32 does, beside a rank of another precision too."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Outcomes = dict[str, Any]


@pytest.fixture(scope="module")
def outcomes(train_all: Callable[..., Outcomes]) -> Outcomes:
    one = {"devices": "cuda:0", "epochs": 2}
    mixed = {"devices": "cuda:0,cpu", "epochs": 2, "precision": ["fp16", "auto"]}
    return train_all(
        fp32={**one, "policy": "sync"},
        fp16_sync={**one, "policy": "sync", "precision": "fp16"},
        fp16_async={**one, "policy": "async", "precision": "fp16"},
        mixed_sync={**mixed, "policy": "sync"},
        mixed_balanced={**mixed, "policy": "balanced", "speed_hints": (1.0, 0.5)},
        mixed_cadence={**mixed, "policy": "cadence"},
        auto={**one, "policy": "sync", "precision": "auto"},
    )


@pytest.mark.parametrize("name", ["fp16_sync", "fp16_async", "mixed_sync", "mixed_balanced", "mixed_cadence", "auto"])
def test_it_learns(outcomes: Outcomes, name: str) -> None:
    assert outcomes[name].error is None
    losses = [epoch.loss for epoch in outcomes[name].epochs]
    assert losses[-1] < losses[0]


def test_one_device_learns_what_it_learns_in_fp32(outcomes: Outcomes) -> None:
    losses = [epoch.loss for epoch in outcomes["fp16_sync"].epochs]
    assert losses == pytest.approx([epoch.loss for epoch in outcomes["fp32"].epochs], rel=0.05)


def test_steps_with_loss_scaling_are_not_captured_and_the_reason_is_said(outcomes: Outcomes) -> None:
    timeline = json.loads((outcomes["fp16_sync"].run_dir / "timeline.json").read_text())
    (event,) = [event for event in timeline["events"] if event["kind"] == "execution"]
    reason = "with fp16 the host decides after each gradient whether the step counts"
    assert (event["value"], event["reason"]) == ("eager", reason)
