"""A gradient that is not finite in shared steps that the host queues before it knows: no update takes it in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from .conftest import Outcome, cross_entropy

PAIR = "cuda:0%50,cuda:0%50"


class Watchful(torch.optim.SGD):
    """Refuses to step with a gradient that is not finite."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                    raise ArithmeticError("a gradient that is not finite came to the optimizer")
        return super().step(closure)


def watchful(parameters: Any) -> torch.optim.Optimizer:
    return Watchful(parameters, lr=0.01, momentum=0.9)


def bad_on_rank_one(model: nn.Module, batch: Any) -> torch.Tensor:
    model.num_calls = getattr(model, "num_calls", 0) + 1  # type: ignore[assignment]
    loss = cross_entropy(model, batch)
    if torch.distributed.get_rank() == 1 and model.num_calls == 9:
        loss = loss + (next(model.parameters()).sum() * 0).sqrt()
    return loss


@pytest.fixture(scope="module")
def spoiled(train_all: Callable[..., dict[str, Outcome]]) -> dict[str, Outcome]:
    common = {"devices": PAIR, "optimizer": watchful, "step": bad_on_rank_one, "execution": "eager", "micro_batch": 32}
    return train_all(
        nccl=common | {"policy": "sync", "backend": "nccl"},
        cpu=common | {"policy": "sync", "backend": "cpu"},
        balanced=common | {"policy": "balanced", "backend": "nccl", "shares": (0.5, 0.5)},
    )


@pytest.mark.parametrize("name", ["nccl", "cpu", "balanced"])
def test_no_optimizer_sees_it_and_the_rank_is_named(spoiled: dict[str, Outcome], name: str) -> None:
    error = spoiled[name].error
    assert error is not None
    assert error.message.startswith("rank 1 (cuda:0%50), step ")
    assert error.message.endswith(": the gradient is not finite")
