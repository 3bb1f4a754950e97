"""A small regression problem, and two ways to train on it: in this very process, or on two ranks of unequal speed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from torch import nn

import outrider

NUM_SAMPLES = 96
Trainer = Callable[..., outrider.Run]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def squared_error(model: nn.Module, batch: Any) -> Any:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def make_data(num_samples: int = NUM_SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(7))
    return inputs, inputs.sum(dim=1, keepdim=True)


@pytest.fixture(scope="session")
def problem() -> dict[str, Any]:
    return {"model": make_model, "optimizer": make_optimizer, "step": squared_error, "dataset": make_data()}


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of a world of one: `train()` adopts them, and this process is the rank."""
    port = free_port()
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def train_here(one_rank: None, problem: dict[str, Any], tmp_path: Path) -> Trainer:
    """`train()` in this process with `cadence`; the run folder is `tmp_path / "run"` unless said otherwise."""

    def train(**options: Any) -> outrider.Run:
        defaults = {"batch_size": 8, "devices": "cpu", "policy": "cadence", "run_dir": tmp_path / "run"}
        return outrider.train(**{**problem, **defaults, **options})

    return train


@pytest.fixture(scope="session")
def train_two(problem: dict[str, Any]) -> Trainer:
    """`train()` with `cadence` on two ranks that are processes of their own."""

    def train(**options: Any) -> outrider.Run:
        defaults = {"batch_size": 8, "devices": "cpu,cpu@0.5", "policy": "cadence"}
        return outrider.train(**{**problem, **defaults, **options})

    return train


@pytest.fixture(scope="session")
def read_json() -> Callable[[Path], Any]:
    return lambda path: json.loads(path.read_text())


@pytest.fixture(scope="session")
def events(read_json: Callable[[Path], Any]) -> Callable[..., list[dict[str, Any]]]:
    """The events of a kind in a run's timeline."""

    def select(run_dir: Path, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_json(run_dir / "timeline.json")["events"] if event["kind"] == kind]

    return select
