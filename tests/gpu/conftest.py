"""Tests that need a CUDA device; all of them are skipped where there is none.

Start-up of CUDA processes dominates, so runs are started together and each is looked at from many sides.
One command: python -m pytest tests/gpu
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import outrider
from outrider.errors import OutriderError

NUM_SAMPLES = 2_048
NUM_FEATURES = 32
Trainer = Callable[..., outrider.Run]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _mps_processes() -> dict[int, int]:
    """Daemons and their servers, by number, with the number of their parent."""
    seen = psutil.process_iter(["pid", "ppid", "name"])
    return {one.info["pid"]: one.info["ppid"] for one in seen if one.info["name"].startswith("nvidia-cuda-mps")}


@pytest.fixture(scope="session", autouse=True)
def new_daemons() -> Callable[[], set[int]]:
    """What was not there before the first test; other programs may have daemons of their own, which start servers."""
    before = _mps_processes()
    return lambda: {pid for pid, parent in _mps_processes().items() if not {pid, parent} & before.keys()}


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=5e-3)


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator)
    teacher = torch.randn(NUM_FEATURES, generator=generator)
    return inputs, (inputs @ teacher > 0).long()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended, whatever became of it."""

    epochs: tuple[outrider.EpochMetrics, ...]
    run_dir: Path
    error: OutriderError | None


def outcome(run: outrider.Run) -> Outcome:
    error: OutriderError | None = None
    with run:
        try:
            run.join()
        except OutriderError as caught:
            error = caught
    return Outcome(epochs=tuple(run.epochs), run_dir=run.run_dir, error=error)


@pytest.fixture(scope="session")
def train() -> Trainer:
    """`train()` on a small classification problem, with every average verified."""
    defaults = {
        "model": make_model,
        "optimizer": make_optimizer,
        "step": cross_entropy,
        "dataset": make_data(),
        "batch_size": 32,
        "epochs": 3,
        "anchor": 4,
        "verify": True,
        "timeout_s": 120,
        "threads_per_rank": 1,
    }
    return lambda **options: outrider.train(**{**defaults, **options})


@pytest.fixture(scope="session")
def train_all(train: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Outcome]]:
    """Runs at the same time, by name; each name comes with its options."""

    def start_and_join(**options_by_name: dict[str, Any]) -> dict[str, Outcome]:
        runs = {
            name: train(run_dir=tmp_path_factory.mktemp(name), **options) for name, options in options_by_name.items()
        }
        return {name: outcome(run) for name, run in runs.items()}

    return start_and_join
