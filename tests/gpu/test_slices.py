"""Two slices of one GPU through the front door: every policy on both backends, a slice alone, and ranks that fail."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from outrider.bench.models.imagenet_resnet import resnet34
from outrider.errors import StepError

PAIR = "cuda:0%70,cuda:0%12"
POLICIES = ("auto", "sync", "balanced", "cadence", "async")
# Measured, the small slice is so slow that in runs as short as these it would not be tried.
BEGINS_SHARED = {"speed_hints": (1.0, 0.5)}
TrainAll = Callable[..., dict[str, Any]]


class TroubledStep:
    """A step that goes wrong in rank 1 once training is under way, by what `trouble` does."""

    def __init__(self, trouble: Callable[[], None]) -> None:
        self.trouble = trouble
        self.num_calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self.num_calls += 1
        if os.environ["RANK"] == "1" and self.num_calls > 10:
            self.trouble()
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def fail() -> None:
    raise ValueError("loss went wrong")


class SlowAdam(torch.optim.Adam):
    """Its update takes rank 1 so long that sharing steps with it only costs time."""

    def step(self, closure: Any = None) -> Any:
        if os.environ["RANK"] == "1":
            time.sleep(0.05)
        return super().step(closure)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def runs(train_all: TrainAll) -> dict[str, Any]:
    """Every policy on every backend, four runs at a time, each with a daemon of its own."""
    outcomes: dict[str, Any] = {}
    for backend in ("nccl", "cpu"):
        outcomes |= train_all(
            **{
                f"{backend}-{policy}": {"policy": policy, "backend": backend, "devices": PAIR}
                | (BEGINS_SHARED if policy in ("auto", "balanced") else {})
                for policy in POLICIES
            }
        )
    return outcomes


@pytest.fixture(scope="module")
def failures(train_all: TrainAll) -> dict[str, Any]:
    # A step that is captured is not called any more.
    common = {"devices": PAIR, "execution": "eager"}
    resting = common | BEGINS_SHARED | {"policy": "balanced", "optimizer": SlowAdam}
    return train_all(
        **{
            "nccl-fails": common | {"backend": "nccl", "policy": "async", "step": TroubledStep(fail)},
            "cpu-fails": common | {"backend": "cpu", "policy": "async", "step": TroubledStep(fail)},
            "nccl-rests": resting | {"backend": "nccl"},
            "cpu-rests": resting | {"backend": "cpu"},
            "nccl-dies": common | {"backend": "nccl", "policy": "sync", "step": TroubledStep(die)},
        },
        alone={"devices": "cuda:0%12"},
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", ["nccl", "cpu"])
def test_two_slices_train_with_every_average_exact(runs: dict[str, Any], backend: str, policy: str) -> None:
    run = runs[f"{backend}-{policy}"]
    assert run.error is None
    assert [epoch.samples for epoch in run.epochs] == [2_048] * 3
    assert run.epochs[-1].loss < 0.6 * run.epochs[0].loss


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", ["nccl", "cpu"])
def test_both_slices_take_part(runs: dict[str, Any], backend: str, policy: str) -> None:
    assert min(runs[f"{backend}-{policy}"].epochs[0].share_by_rank) > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", ["nccl", "cpu"])
def test_the_cost_of_averages_is_measured(runs: dict[str, Any], backend: str, policy: str) -> None:
    # In balanced one slice may come to work alone, and then averages with nobody.
    shared = [epoch for epoch in runs[f"{backend}-{policy}"].epochs if min(epoch.share_by_rank) > 0]
    assert shared
    assert all(epoch.averages > 0 and epoch.exposed_average_fraction > 0 for epoch in shared)


def test_one_slice_alone_trains(failures: dict[str, Any]) -> None:
    assert failures["alone"].error is None
    assert failures["alone"].epochs[-1].loss < 0.6 * failures["alone"].epochs[0].loss


@pytest.mark.parametrize("backend", ["nccl", "cpu"])
def test_the_exception_of_a_rank_is_reported_and_not_what_it_does_to_its_peer(
    failures: dict[str, Any], backend: str
) -> None:
    error = failures[f"{backend}-fails"].error
    assert isinstance(error, StepError)
    # Calls before the first step are not steps: the rehearsal's and the trial's.
    assert re.fullmatch(r"rank 1 \(cuda:0%12\), step \d+: ValueError: loss went wrong", error.message)


def test_the_death_of_a_rank_is_reported_and_not_what_it_does_to_its_peer(failures: dict[str, Any]) -> None:
    assert failures["nccl-dies"].error.message == "rank 1 (cuda:0%12) died with signal 9 (SIGKILL)"


@pytest.mark.parametrize("backend", ["nccl", "cpu"])
def test_a_slice_that_only_holds_up_the_other_rests(failures: dict[str, Any], backend: str) -> None:
    run = failures[f"{backend}-rests"]
    assert run.error is None
    events = json.loads((run.run_dir / "timeline.json").read_text())["events"]
    assert [event["value"] for event in events if event["kind"] == "alone"] == [0]
    assert list(run.epochs[-1].share_by_rank) == [1.0, 0.0]
    assert [epoch.samples for epoch in run.epochs] == [2_048] * 3
    assert run.epochs[-1].loss < run.epochs[0].loss


@pytest.mark.usefixtures("runs", "failures")
def test_no_daemon_is_left_behind(new_daemons: Callable[[], set[int]]) -> None:
    assert new_daemons() == set()


def make_resnet34() -> nn.Module:
    return resnet34(num_classes=10)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def test_batch_norms_of_large_models_do_not_wait_for_each_other(train_all: TrainAll) -> None:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8_192, 3, 32, 32, generator=generator), torch.randint(10, (8_192,), generator=generator)
    run = train_all(
        convolutions={
            "model": make_resnet34,
            "optimizer": sgd,
            "dataset": images,
            "batch_size": 512,
            "epochs": 2,
            "devices": "cuda:0%80,cuda:0%16",
            "policy": "sync",
            "backend": "nccl",
            "verify": False,
        }
    )["convolutions"]
    assert run.error is None
    assert len(run.epochs) == 2
