"""Gradients of more than one bucket over NCCL, in steps that nobody waits in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

PAIR = "cuda:0%50,cuda:0%50"


def make_wide_model() -> nn.Module:
    layers = (nn.Linear(32, 2_000), nn.Tanh(), nn.Linear(2_000, 2_000), nn.Tanh(), nn.Linear(2_000, 2))
    return nn.Sequential(*layers).double()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def step_in_double(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0].double()), batch[1])


@pytest.fixture(scope="module")
def trained(train_all: Callable[..., dict[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    common = {"model": make_wide_model, "optimizer": make_optimizer, "step": step_in_double, "epochs": 1}
    runs = train_all(
        alone=common | {"devices": "cuda:0", "batch_size": 64, "execution": "eager"},
        eager=common | {"devices": PAIR, "policy": "sync", "backend": "nccl", "execution": "eager"},
        graph=common | {"devices": PAIR, "policy": "sync", "backend": "nccl", "execution": "graph"},
        auto=common | {"devices": PAIR, "policy": "sync", "backend": "nccl", "execution": "auto"},
        micro=common
        | {"devices": PAIR, "policy": "sync", "backend": "nccl", "execution": "eager", "micro_batch": (8, 16)},
        host=common | {"devices": PAIR, "policy": "sync", "backend": "cpu", "execution": "eager"},
    )
    assert {name: run.error for name, run in runs.items()} == dict.fromkeys(runs)
    return {name: load_file(run.run_dir / "model.safetensors") for name, run in runs.items()}


# A captured step reads its learning rate from a float32 tensor, as torch's fused optimizers do.
@pytest.mark.parametrize(
    ("name", "atol"), [("eager", 1e-11), ("graph", 1e-8), ("auto", 1e-8), ("micro", 1e-11), ("host", 1e-11)]
)
def test_two_ranks_equal_one_on_the_whole_batch(
    trained: dict[str, dict[str, torch.Tensor]], name: str, atol: float
) -> None:
    for key, expected in trained["alone"].items():
        torch.testing.assert_close(trained[name][key], expected, rtol=0, atol=atol)
