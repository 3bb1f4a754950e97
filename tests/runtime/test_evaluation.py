"""Evaluation shared by ranks: every sample once, whoever takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from outrider.core.effects import Lease
from outrider.data.feed import make_feed
from outrider.data.leases import Leases, LocalLeases
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica
from outrider.runtime.evaluation import TRIED_TIMES, Evaluation
from outrider.runtime.metrics import RankAccount

CPU = torch.device("cpu")
NUM_SAMPLES = 1_000


def open_leases(key: str, span: Lease, *, batch_size: int) -> Leases:
    return LocalLeases(span, batch_size=batch_size)


def evaluation(evaluate: Any, *, batch_size: int) -> Evaluation:
    data = torch.arange(float(NUM_SAMPLES)).reshape(-1, 1)
    recipe = Recipe(
        model=nn.Linear(1, 1),
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


def account(samples: int, seconds: float, *, catch_up_s: float) -> RankAccount:
    return RankAccount(
        loss_sum=0.0,
        loss_samples=0,
        eval_sum=0.0,
        eval_samples=samples,
        samples=0,
        logged={},
        averages=0,
        average_cost_s=0.0,
        wait_s=0.0,
        seconds=1.0,
        eval_s=seconds,
        wants_stop=False,
        catch_up_s=catch_up_s,
    )


@pytest.mark.parametrize(
    ("seconds", "catch_up_s", "is_worth_it"),
    [
        pytest.param((0.9, 0.9), 0.1, True, id="the other saves more than it takes to bring it up to date"),
        pytest.param((1.1, 1.1), 0.3, False, id="bringing it up to date takes longer"),
        pytest.param((0.9, 1.1), 0.1, False, id="the other is so slow that all wait for it"),
        pytest.param((0.8, 1.1), 0.0, True, id="it was up to date, so that nothing is told of what that takes"),
    ],
)
def test_an_evaluation_is_shared_where_that_is_quicker(
    seconds: tuple[float, float], catch_up_s: float, is_worth_it: bool
) -> None:
    shared = evaluation(lambda model, batch: 0.0, batch_size=8)
    accounts = [account(800, seconds[0], catch_up_s=catch_up_s), account(200, seconds[1], catch_up_s=catch_up_s)]
    # Alone, the first would take a second for all.
    for _ in range(TRIED_TIMES):
        assert shared.is_worth_sharing
        shared.judge_sharing(accounts, lone=0)
    assert shared.is_worth_sharing == is_worth_it


def test_an_evaluation_in_which_who_works_alone_had_no_part_tells_nothing() -> None:
    shared = evaluation(lambda model, batch: 0.0, batch_size=8)
    for _ in range(TRIED_TIMES):
        shared.judge_sharing([account(0, 1.0, catch_up_s=1.0), account(100, 1.1, catch_up_s=1.0)], lone=0)
    assert shared.is_worth_sharing


def test_one_evaluation_that_was_disturbed_decides_nothing() -> None:
    shared = evaluation(lambda model, batch: 0.0, batch_size=8)
    for seconds in (1.9, 0.9, 0.9):
        shared.judge_sharing([account(800, 0.9, catch_up_s=0.1), account(200, seconds, catch_up_s=0.1)], lone=0)
    assert shared.is_worth_sharing


def test_who_evaluates_alone_takes_all_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = evaluation(lambda model, batch: batch.mean(), batch_size=8)
    monkeypatch.delattr(alone, "_open_leases")
    assert alone.run("eval/0", is_alone=True).samples == NUM_SAMPLES
