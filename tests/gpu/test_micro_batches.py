"""Memory that really runs out on a CUDA device: the step is taken again, and captured steps have micro-batches."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.data.packed_batch import PackedBatch
from outrider.policy.effects import Decision
from outrider.replica.execution import choose_execution
from outrider.replica.micro_batch_search import find_micro_batch
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica

WIDTH, DEPTH, BATCH = 4096, 24, 8192
LIMIT_BYTES = 9 * 2**29
"""A whole batch keeps 24 activations of 134 MB, 3.2 GB, beside 1.6 GB of parameters; gradients replace activations."""


@pytest.fixture
def small_card() -> Iterator[torch.device]:
    """The first device, with the memory of a small one for this process."""
    device = torch.device("cuda:0")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / torch.cuda.mem_get_info(device)[1], device)
    yield device
    torch.cuda.set_per_process_memory_fraction(1.0, device)


def make_model() -> nn.Module:
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(WIDTH, 1))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def make(device: torch.device, **options: Any) -> Replica:
    recipe = Recipe(
        model=make_model,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        step=squares,
        dataset=torch.zeros(BATCH, 1),
        batch_size=BATCH,
        policy="cadence",
        **options,
    )
    return Replica(recipe, device=device, rank=0, name="cuda:0")


def test_a_step_that_runs_out_of_memory_is_taken_again(small_card: torch.device) -> None:
    data = torch.randn(BATCH, WIDTH, device=small_card)
    replica = make(small_card)
    told: list[Decision] = []
    replica.on_micro_batch = told.append
    for number in range(3):
        replica.step(data, samples=BATCH, at=number * BATCH)
    (decision,) = told
    assert decision.value < BATCH
    loss, samples = replica.loss_sums.drain()
    assert samples == 3 * BATCH
    assert 0 < loss / samples < 100
    held = torch.cuda.memory_allocated(small_card)
    del replica
    gc.collect()
    whole = make(small_card, micro_batch=decision.value)
    for number in range(3):
        whole.step(data, samples=BATCH, at=number * BATCH)
    assert whole.loss_sums.drain()[0] == pytest.approx(loss, rel=1e-5)
    # Nothing of the failed attempt is left: buffers for the step's start aside.
    assert held == pytest.approx(torch.cuda.memory_allocated(small_card), rel=0.02)


def test_the_search_finds_a_size_that_then_fits(small_card: torch.device) -> None:
    data = torch.randn(BATCH, WIDTH, device=small_card)
    replica = make(small_card)
    found = find_micro_batch(replica, data, samples=BATCH)
    assert found is not None
    assert found.details["largest"] < BATCH
    told: list[Decision] = []
    replica.on_micro_batch = told.append
    for number in range(3):
        replica.step(data, samples=BATCH, at=number * BATCH)
    assert told == []


def test_a_trial_of_captured_steps_leaves_its_memory_to_eager_ones(small_card: torch.device) -> None:
    """Half a batch fits once beside the model, and not a second time in memory set aside for graphs."""
    data = torch.randn(BATCH // 2, WIDTH, device=small_card)
    replica = make(small_card, execution="graph")
    batch = PackedBatch(inputs=data, unpack=lambda inputs: inputs)
    choose_execution(replica, lambda: batch, samples=BATCH // 2, on_decision=lambda decision: None)
    set_aside = torch.cuda.memory_reserved(small_card) - torch.cuda.memory_allocated(small_card)
    assert set_aside < 200 * 2**20
    told: list[Decision] = []
    replica.on_micro_batch = told.append
    for number, size in enumerate((BATCH // 2, BATCH // 2, BATCH // 2, BATCH // 2 - 8, BATCH // 2 - 8)):
        replica.step(data[:size], samples=size, at=number * BATCH // 2)
    assert told == []


def test_captured_steps_have_micro_batches(train_all: Callable[..., dict[str, Any]]) -> None:
    basics = {"execution": "graph", "devices": "cuda:0", "epochs": 2, "policy": "sync", "batch_size": 64}
    done = train_all(cut={**basics, "micro_batch": 16}, accumulated={**basics, "accumulate": 4})
    assert [outcome.error for outcome in done.values()] == [None, None]
    timeline = json.loads((done["cut"].run_dir / "timeline.json").read_text())
    (execution,) = [event for event in timeline["events"] if event["kind"] == "execution"]
    assert execution["value"] == "graph"
    losses = {name: [epoch.loss for epoch in outcome.epochs] for name, outcome in done.items()}
    assert losses["cut"] == pytest.approx(losses["accumulated"], rel=1e-6)


def test_a_limit_of_memory_is_kept_and_one_beyond_the_card_refused(train_all: Callable[..., dict[str, Any]]) -> None:
    done = train_all(
        limited={"devices": "cuda:0:1GiB", "model": large_model, "epochs": 1, "policy": "sync"},
        beyond={"devices": "cuda:0:9000GiB", "epochs": 1, "policy": "sync"},
    )
    assert "out of memory" in str(done["limited"].error).lower()
    assert str(done["beyond"].error).startswith("rank 0 is to use 9000GiB of cuda:0, which has ")


def large_model() -> nn.Module:
    """1.6 GB of parameters."""
    return nn.Sequential(nn.Linear(32, 2), _Ballast())


class _Ballast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ballast = nn.Parameter(torch.zeros(400_000_000))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.ballast[:1]
