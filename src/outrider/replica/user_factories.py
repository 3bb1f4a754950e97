"""Creates model, optimizer and schedule from the functions of a recipe, and raises for objects of other types.

Called when a replica is created. Also silences torch's advice on the order of schedule and optimizer.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Iterator

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from outrider.errors import ConfigError
from outrider.replica.recipe import Recipe
from outrider.replica.tuning import to_channels_last


def make_model(recipe: Recipe) -> nn.Module:
    model = copy.deepcopy(recipe.model) if isinstance(recipe.model, nn.Module) else recipe.model()
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model must be a torch.nn.Module or a function that makes one, got {type(model).__name__}",
            hint="pass model=make_model where make_model() returns an nn.Module",
        )
    if recipe.memory_format == "channels_last":
        to_channels_last(model)
    return model


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = recipe.optimizer(model.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer must make a torch.optim.Optimizer, got {type(optimizer).__name__}",
            hint="pass optimizer=lambda p: torch.optim.Adam(p, 1e-3)",
        )
    refuse_closures(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * (1.0 if recipe.lr_scale == "auto" else recipe.lr_scale)
    return optimizer


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer that computes gradients itself, such as LBFGS: they would not be averaged."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} computes several gradients in each of its steps, and ranks average one",
            hint="use an optimizer of one gradient per step, such as SGD, Adam or AdamW",
        )


def make_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    if recipe.scheduler is None:
        return None
    scheduler = recipe.scheduler(optimizer)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            f"scheduler must make a learning-rate schedule that advances by steps, got {type(scheduler).__name__}",
            hint="pass scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, num_steps)",
        )
    return scheduler


@contextlib.contextmanager
def no_advice_on_order() -> Iterator[None]:
    """Suppress torch's warning about a schedule that advances before the optimizer: steps of other ranks advance it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        yield
