"""Evaluation shared by ranks: every sample once, whoever takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from outrider.data.feed import make_feed
from outrider.data.leases import Leases, LocalLeases
from outrider.policy.effects import Lease
from outrider.rank.shared_evaluation import Evaluation
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica

CPU = torch.device("cpu")
NUM_SAMPLES = 1_000


def open_leases(key: str, span: Lease, *, batch_size: int) -> Leases:
    return LocalLeases(span, batch_size=batch_size)


def evaluation(evaluate: Any, *, batch_size: int, model: nn.Module | None = None) -> Evaluation:
    data = torch.arange(float(NUM_SAMPLES)).reshape(-1, 1)
    recipe = Recipe(
        model=model or nn.Linear(1, 1),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        step=lambda model, batch: model(batch).mean(),
        dataset=data,
        batch_size=batch_size,
        evaluate=evaluate,
        eval_dataset=data,
    )
    replica = Replica(recipe, device=CPU, rank=0, name="cpu")
    return Evaluation(replica, make_feed(data, device=CPU, seed=0), open_leases, world_size=1)


def test_every_sample_counts_once() -> None:
    seen: list[float] = []

    def evaluate(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.extend(batch.flatten().tolist())
        return batch.mean()

    evaluated = evaluation(evaluate, batch_size=8).run("eval/0")
    assert seen == [float(index) for index in range(NUM_SAMPLES)]
    assert (evaluated.total, evaluated.samples) == (sum(seen), NUM_SAMPLES)


def test_evaluation_batches_are_at_least_twice_the_training_batch() -> None:
    sizes: list[int] = []

    def evaluate(model: nn.Module, batch: torch.Tensor) -> float:
        sizes.append(len(batch))
        return 0.0

    evaluation(evaluate, batch_size=200).run("eval/0")
    assert max(sizes) == 400


def test_an_evaluation_can_be_repeated() -> None:
    shared = evaluation(lambda model, batch: batch.mean(), batch_size=8)
    first, second = shared.run("eval/0"), shared.run("eval/1")
    assert (first.total, first.samples) == (second.total, second.samples)


def test_who_evaluates_alone_takes_all_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = evaluation(lambda model, batch: batch.mean(), batch_size=8)
    monkeypatch.delattr(alone, "_open_leases")
    assert alone.run("eval/0", is_alone=True).samples == NUM_SAMPLES


def test_a_layer_that_was_frozen_in_evaluation_mode_stays_so() -> None:
    seen: list[nn.Module] = []

    def evaluate(model: nn.Module, batch: torch.Tensor) -> float:
        seen.append(model)
        return float(any(module.training for module in model.modules()))

    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    frozen = evaluation(evaluate, batch_size=8, model=model)
    assert frozen.run("eval/0").total == 0.0
    seen[0].get_submodule("1").eval()
    assert frozen.run("eval/1").total == 0.0
    assert [module.training for module in seen[0].modules()] == [True, True, False]
