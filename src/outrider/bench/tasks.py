"""The tasks of benchmarks: model, optimizer, data and target, the same for every mode.

Decides sizes and learning rates of the demo's and the overhead benchmark's tasks; the suite's are in `zoo`.
Starts nothing. Called by the demo, the benchmarks and the zoo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, LRScheduler
from torch.utils.data import TensorDataset

from outrider.bench.datasets.mnist import NUM_CLASSES, SIDE, glyphs
from outrider.bench.models.image_models import accuracy, cross_entropy_step, lenet, mlp, wide_lenet
from outrider.data.augmented_feed import AugmentFunction
from outrider.errors import unknown_name
from outrider.replica.recipe import EvaluateFunction, OptimizerFactory, SchedulerFactory, StepFunction

MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "lenet": lenet}
LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """A training task; `batch_size` is per rank, for `balanced` that of the whole world."""

    name: str
    data_name: str
    model: Callable[[], nn.Module]
    optimizer: OptimizerFactory
    step: StepFunction
    dataset: Any
    batch_size: int
    epochs: int
    evaluate: EvaluateFunction | None = None
    eval_dataset: Any = None
    scheduler: SchedulerFactory | None = None
    augment: AugmentFunction | None = None
    max_grad_norm: float | None = None
    joined_warm_up: int | None = None
    """Where a step takes the batches of N ranks, its learning rate rises to N times as much over so many ticks of the
    schedule (Goyal et al. 2017); None: it stays as it is."""
    metric: Literal["accuracy", "mse", "loss"] = "accuracy"
    """What `evaluate` gives."""
    larger_is_better: bool = True
    target: float | None = None
    """The evaluation to reach, for time to target."""
    published: float | None = None
    """What others report for real data; None if nothing is known or the data are a stand-in."""
    is_stand_in: bool = False
    seed: int = 0


def rising(make: SchedulerFactory | None, num_ranks: int, ticks: int) -> SchedulerFactory:
    """The same schedule for N times the rate, reached in equal steps from the rate that one batch has."""
    return partial(_rising, make, num_ranks, ticks)


def _rising(make: SchedulerFactory | None, num_ranks: int, ticks: int, optimizer: torch.optim.Optimizer) -> LRScheduler:
    warm_up = LinearLR(optimizer, start_factor=1 / num_ranks, total_iters=ticks)
    return warm_up if make is None else ChainedScheduler([make(optimizer), warm_up])


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, LEARNING_RATE)


def demo_task(*, epochs: int, num_train: int = 3_000, num_test: int = 1_500) -> Task:
    """A wide LeNet on drawn glyphs: small enough for a laptop, with steps that are long enough to be shared."""
    data = glyphs(num_train, num_test)
    return Task(
        name="wide lenet",
        data_name=data.name,
        model=wide_lenet,
        optimizer=adam,
        step=cross_entropy_step,
        dataset=data.train,
        batch_size=128,
        epochs=epochs,
        evaluate=accuracy,
        eval_dataset=data.test,
        target=0.98,
        is_stand_in=data.is_stand_in,
    )


def speed_task(model_name: str, *, epochs: int, num_samples: int) -> Task:
    """A model on random images: nothing to learn, the same work; made in each rank, so that nothing large travels."""
    return Task(
        name=model_name,
        data_name=f"random 1 × {SIDE} × {SIDE} images",
        model=model_named(model_name),
        optimizer=adam,
        step=cross_entropy_step,
        dataset=partial(random_images, num_samples),
        batch_size=64,
        epochs=epochs,
        is_stand_in=True,
    )


def model_named(name: str) -> Callable[[], nn.Module]:
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    return MODELS[name]


def random_images(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(num_samples, 1, SIDE, SIDE, generator=generator)
    return TensorDataset(images, torch.randint(NUM_CLASSES, (num_samples,), generator=generator))
