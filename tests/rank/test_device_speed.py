"""How fast devices are before their first step: a short measurement, and the first split that follows from it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import outrider
from outrider.policy.weights import LEAST_SPEED, relative_speeds
from outrider.rank import device_speed
from outrider.rank.device_speed import TIMES_IN_DOUBT, measured_speed, speeds_of_all
from outrider.world.world import World


class MeasuredWorld:
    """Two ranks whose measurements come from a list; a pause between two takes no time."""

    size, device, spec = 2, torch.device("cpu"), SimpleNamespace(speed=1.0)

    def __init__(self, *told: tuple[float, float]) -> None:
        self.left = list(told)

    def exchange_json(self, own: float, **_: str) -> list[float]:
        return list(self.left.pop(0))


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param([(10.0, 4.0)], (1.0, 0.4), id="clear"),
        pytest.param([(10.0, 1.0)], (1.0, 0.1), id="clearly much slower"),
        pytest.param([(10.0, 2.0), (9.0, 4.0)], (1.0, 0.4), id="slowed down for a moment"),
        pytest.param([(6.0, 1.0), (10.0, 1.0)], (1.0, 0.1), id="the fast one slowed down for a moment"),
        pytest.param([(10.0, 2.0)] * TIMES_IN_DOUBT, (1.0, 0.2), id="a fifth of the speed indeed"),
    ],
)
def test_speeds_near_the_border_of_beginning_alone_are_measured_again(
    told: list[tuple[float, float]], expected: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_speed, "PAUSE_IN_DOUBT_S", 0.0)
    world = MeasuredWorld(*told)
    assert speeds_of_all(cast(World, world)) == expected
    assert world.left == []


def test_a_device_has_a_speed() -> None:
    assert measured_speed(torch.device("cpu")) > 0


def test_speeds_are_parts_of_the_fastest_and_no_rank_goes_without_samples() -> None:
    assert relative_speeds([50.0, 200.0, 0.1]) == (0.25, 1.0, LEAST_SPEED)


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def first_speeds(folder: Path, **options: Any) -> list[list[float]]:
    outrider.train(
        nn.Linear(4, 1),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        options.pop("step", step),
        (torch.ones(256, 4),),
        devices="cpu,cpu@0.1",
        threads_per_rank=1,
        run_dir=folder / "run",
        **{"batch_size": 16, **options},
    ).join()
    events = json.loads((folder / "run" / "timeline.json").read_text())["events"]
    return [event["value"] for event in events if event["kind"] == "speeds"]


@pytest.mark.parametrize(
    "policy", ["auto", *(pytest.param(policy, marks=pytest.mark.slow) for policy in ("balanced", "async", "cadence"))]
)
def test_ranks_that_share_out_batches_agree_on_their_speeds(tmp_path: Path, policy: str) -> None:
    first, second = first_speeds(tmp_path, policy=policy)
    assert first == second
    assert first[0] == 1.0
    assert first[1] < 0.5


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "sync"},
        {"policy": "independent"},
        {"shares": (1.0, 1.0), "policy": "balanced"},
        {"speed_hints": (1.0, 1.0), "policy": "async"},
    ],
)
def test_where_nothing_is_split_by_speed_nothing_is_measured(tmp_path: Path, options: dict[str, Any]) -> None:
    assert first_speeds(tmp_path, **options) == []


def test_the_first_window_is_planned_by_them(tmp_path: Path) -> None:
    first_speeds(tmp_path, policy="cadence", batch_size=2)
    events = json.loads((tmp_path / "run" / "timeline.json").read_text())["events"]
    plan = next(event for event in events if event["kind"] == "plan")
    assert plan["reason"] == "probe, in proportion to a short measurement of the devices"
    assert plan["value"][0] > plan["value"][1] == 2


def test_a_short_run_beside_a_much_slower_device_is_left_to_the_fast_one(tmp_path: Path) -> None:
    first_speeds(tmp_path, policy="auto", batch_size=16, epochs=3)
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert [epoch["share_by_rank"] for epoch in record["epochs"]] == [[1.0, 0.0]] * 3
    events = json.loads((tmp_path / "run" / "timeline.json").read_text())["events"]
    reasons = [event["reason"] for event in events if event["kind"] in ("alone", "policy")]
    assert len(reasons) == 2
    assert reasons[0].endswith("of the speed of rank 0, which begins alone")
    assert reasons[1].startswith("rank 0 works alone: the run is too short to try the others")


class SlowStep:
    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.2)
        return step(model, batch)


def test_ranks_that_rest_hear_from_the_one_that_works_in_time(tmp_path: Path) -> None:
    """Sixteen steps would take longer than others wait."""
    first_speeds(tmp_path, policy="balanced", batch_size=16, step=SlowStep(), timeout_s=2.0)
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["epochs"][0]["share_by_rank"] == [1.0, 0.0]
