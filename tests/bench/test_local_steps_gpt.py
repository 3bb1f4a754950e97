"""The arithmetic of the study of a GPT under local steps; the study itself needs a GPU and ten minutes."""

from __future__ import annotations

import importlib
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.average.outer import Outer
from outrider.bench.models.text_models import next_symbol_loss
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench, train

TICKS = 30


@pytest.fixture(scope="module")
def study() -> Any:
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module("local_steps_runs")
    sys.path.remove(folder)


@pytest.fixture
def setting(study: Any) -> Any:
    text = torch.randint(0, 64, (4_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    shape = study.Shape(width=16, num_heads=2, num_blocks=1, context=16, batch_size=4)
    train, test = text[:3_000], text[3_000:]
    deadline_s = time.monotonic() + 600
    return study.Setting(shape=shape, train=train, test=test, ticks=TICKS, best_rate=4e-3, deadline_s=deadline_s)


def study_values(study: Any, setting: Any, **cell: Any) -> torch.Tensor:
    """The parameters with which a cell of the study ends."""
    text = torch.cat([setting.train, setting.test])
    replicas = [study.FlatGpt(setting.shape, text, is_compiled=False) for _ in range(2)]
    trainer = study.Trainer(study.Cell(**cell), setting, replicas)
    study.RUNS[cell["kind"]](trainer)
    return replicas[0].values.detach()


def lab_values(study: Any, setting: Any, **cell: Any) -> torch.Tensor:
    """The same in the lab."""
    shape, count = setting.shape, round(cell.get("length", study.LIMIT) * TICKS)
    starts = study.batches_of(len(setting.train), shape, count, seed=10).flatten()
    windows = setting.train[starts[:, None] + torch.arange(shape.context + 1)]

    def model() -> torch.nn.Module:
        own = shape.model()
        torch.nn.utils.vector_to_parameters(study.initial_values(shape, 0), own.parameters())
        return own

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, partial(study.part_of_rate, ticks=count))

    momentum = cell.get("momentum")
    recipe = Recipe(
        model=model,
        optimizer=partial(torch.optim.AdamW, lr=setting.best_rate, betas=(0.9, 0.95), weight_decay=0.1),
        scheduler=schedule,
        step=next_symbol_loss,
        dataset=(windows,),
        shuffle=False,
        batch_size=shape.batch_size,
        max_grad_norm=1.0,
        policy=cell["kind"] if "anchor" in cell else "balanced",
        anchor=cell.get("anchor"),
        outer=Outer() if momentum is None else Outer(kind="nesterov", momentum=momentum),
    )
    is_async = cell["kind"] == "async"
    speeds = study.SPEEDS if "anchor" in cell else study.SPEEDS[:1]
    run = train(recipe, Bench(speeds=speeds, average_cost=cell["window"] / 2 if is_async else 0.0))
    return torch.cat([p.detach().flatten() for p in run.work.replicas[0].model.parameters()])


@pytest.mark.parametrize(
    "cell",
    [
        {"kind": "alone", "length": 1.0},
        {"kind": "cadence", "anchor": 2, "window": 5},
        {"kind": "cadence", "anchor": 2, "window": 5, "momentum": "auto"},
        {"kind": "async", "anchor": 2, "window": 5},
    ],
    ids=str,
)
def test_a_run_of_the_study_ends_where_the_lab_ends(study: Any, setting: Any, cell: dict[str, Any]) -> None:
    apart = study_values(study, setting, **cell) - lab_values(study, setting, **cell)
    # AdamW divides by small numbers, so different orders of summation show.
    assert apart.norm() < 1e-3 * study.initial_values(setting.shape, 0).norm()


def test_delayed_nesterov_is_the_algorithm_of_its_paper(study: Any) -> None:
    server = study._Server(torch.zeros(1), buffer_size=2, momentum=0.5, rate=1.0)
    seen = []
    for gradient in (2.0, 4.0, 2.0, 2.0):
        server.receive(torch.tensor([gradient]))
        seen.append(server.values.item())
    # g/2 each; after two, m = 0.5 m + (sum of both)/2 and half of it on top: m is 3, then 3.5.
    assert seen == [-1.0, -1.0 - 2.0 - 1.5, -4.5 - 1.0, -5.5 - 1.0 - 1.75]


def test_a_gradient_that_is_applied_late_belongs_to_the_parameters_before(study: Any, setting: Any) -> None:
    """Two batches make one step, with the gradient of the first batch."""
    two = {"kind": "late", "length": 2 / TICKS}
    late = study_values(study, setting, **two)
    text = torch.cat([setting.train, setting.test])
    replica = study.FlatGpt(setting.shape, text, is_compiled=False)
    trainer = study.Trainer(study.Cell(**two), setting, [replica])
    replica.gradient(trainer.starts[0])
    replica.update(trainer.rate(1))
    assert torch.equal(late, replica.values.detach())
