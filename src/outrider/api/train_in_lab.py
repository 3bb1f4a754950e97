"""`outrider.lab()`: train real replicas in one process under a virtual clock, with the arguments of `train()`.

Decides which options of `train()` have a meaning there; `virtual.lab` does the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Unpack

from torch.utils.data import DataLoader

from outrider.api.options import Options, make_order
from outrider.errors import ConfigError
from outrider.record.run_config import RunConfig
from outrider.replica.recipe import ModelSource, OptimizerFactory, StepFunction
from outrider.virtual.lab import Bench, LabRun
from outrider.virtual.lab import train as train_virtually


def lab(
    model: ModelSource,
    optimizer: OptimizerFactory,
    step: StepFunction,
    dataset: Any,
    *,
    speeds: Sequence[float],
    average_cost: float = 0.0,
    fixed: float = 0.0,
    points_per_epoch: int = 1,
    **options: Unpack[Options],
) -> LabRun:
    """Train on CPU replicas, one per speed, in virtual time; the result is the same on every machine.

    The unit of time is one batch on a device of speed 1. An average takes `average_cost` units, and `fixed` is the part
    of a step that does not depend on its samples. The model is evaluated `points_per_epoch` times per epoch.
    """
    for name in options:
        if name in {field.name for field in fields(RunConfig)}:
            raise ConfigError(
                f"the lab has no option {name!r}: its ranks are replicas in this process",
                hint="pass speeds=(1.0, 0.4), or call outrider.train() to train on devices",
            )
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            "the lab takes a data set, not a DataLoader: its workers and collate_fn have no meaning there",
            hint="pass loader.dataset and batch_size=, and a sampler as order=",
        )
    order = make_order({"model": model, "optimizer": optimizer, "step": step, "dataset": dataset}, options)
    if isinstance(order.recipe.batch_size, dict):
        raise ConfigError(
            "batch_size names devices, which the lab does not have",
            hint="pass one value per speed, such as batch_size=[48, 16]",
        )
    bench = Bench(speeds=tuple(speeds), average_cost=average_cost, fixed=fixed)
    return train_virtually(order.recipe, bench, points_per_epoch=points_per_epoch)
