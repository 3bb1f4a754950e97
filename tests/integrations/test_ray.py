"""Sessions in the workers of Ray Train, on a real cluster of two nodes with unequal devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.integrations.ray import RaySession, as_ray_metrics, ray_options
from outrider.record.epoch_metrics import RankAccount, combine

PROGRAM = Path(__file__).with_name("ray_program.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
NUM_SAMPLES = 256
LAUNCHERS_VARIABLES = ("OUTRIDER_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program prints; its cluster takes most of the time of these tests, so they share it."""
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHERS_VARIABLES}
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path_factory.mktemp("ray")), str(EXAMPLE)],
        env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_ray_gets_every_epoch_with_its_metrics(found: dict[str, Any]) -> None:
    reports = found["run"]["reports"][:3]
    assert [one["epoch"] for one in reports] == [0, 1, 2]
    assert [one["answer"] for one in reports] == [42, 42, 42]
    assert [(one["samples"], one["is_complete"]) for one in reports] == [(NUM_SAMPLES, True)] * 3
    assert reports[2]["share_rank0"] > reports[2]["share_rank1"] > 0


def test_train_reports_its_epochs_too(found: dict[str, Any]) -> None:
    last = found["run"]["last"]
    assert (last["answer"], last["epoch"], last["samples"]) == ("train", 0, NUM_SAMPLES)
    assert len(found["run"]["reports"]) == 4


def test_rank_0_reports_the_checkpoint_of_all_ranks(found: dict[str, Any]) -> None:
    assert found["run"]["files"] == ["model.safetensors", "rank0.pt", "rank1.pt", "state.json"]


def test_workers_have_the_devices_of_their_nodes(found: dict[str, Any]) -> None:
    assert found["run"]["returned"][1:] == ["cpu", "cpu@0.4"]


def test_restarted_workers_go_on_from_the_newest_checkpoint(found: dict[str, Any]) -> None:
    assert found["run"]["attempts"] == [
        "epoch0-attempt0-rank0",
        "epoch1-attempt0-rank0",
        "epoch1-attempt1-rank0",
        "epoch2-attempt1-rank0",
        "epoch2-attempt2-rank0",
    ]
    assert found["run"]["seen_in_epoch_1"] == list(range(NUM_SAMPLES))


def test_workers_without_a_run_folder_go_on_from_rays_checkpoint(found: dict[str, Any]) -> None:
    assert found["run"]["returned"][0] == "outrider-from-epoch00002-000000000000"
    assert found["run"]["seen_in_epoch_2"] == list(range(NUM_SAMPLES))


def test_the_example_runs(found: dict[str, Any]) -> None:
    assert "epoch 1: loss" in found["example"]
    assert len(found["example"].split("shares ")[1].split()) == 2


def test_outside_of_a_worker_the_error_says_where_to_call_it() -> None:
    with pytest.raises(ConfigError, match="this process is no worker of Ray Train") as raised:
        RaySession()
    assert "TorchTrainer" in (raised.value.hint or "")
    with pytest.raises(ConfigError):
        ray_options()


def test_metrics_are_flat_numbers() -> None:
    accounts = [
        RankAccount(
            loss_sum=2.0 * samples,
            loss_samples=samples,
            eval_sum=0.0,
            eval_samples=0,
            samples=samples,
            logged={"confidence": (0.5 * samples, samples)},
            averages=1,
            average_cost_s=0.0,
            wait_s=0.0,
            seconds=1.0,
            eval_s=0.0,
            wants_stop=False,
        )
        for samples in (3, 1)
    ]
    told = combine(
        accounts, epoch=0, learning_rate=0.1, anchor=1, drift=None, train_s_before=0.0, wall_s=1.0, is_complete=True
    )
    flat = as_ray_metrics(told)
    assert (flat["loss"], flat["confidence"], flat["share_rank0"], flat["share_rank1"]) == (2.0, 0.5, 0.75, 0.25)
    assert not any(isinstance(value, (dict, list, tuple)) for value in flat.values())
