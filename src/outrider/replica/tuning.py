"""Speeds up steps without changing the user's code: precision, memory format, fused optimizers, TF32.

Decides how each option is applied; their defaults were measured (docs/log.md). `trial_steps` tests whether a model
works in channels_last. Called when a replica is created.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from outrider.errors import ConfigError
from outrider.replica.capturable_optimizer import fuse
from outrider.replica.recipe import Recipe


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context in which the user's functions run."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[precision])


def to_channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's annotations leave it out


def fuse_optimizer(optimizer: torch.optim.Optimizer, recipe: Recipe, device: torch.device) -> None:
    if recipe.fused_optimizer is False or device.type != "cuda":
        return
    is_fused = fuse(optimizer)
    if recipe.fused_optimizer is True and not is_fused:
        raise ConfigError(
            f"fused_optimizer=True, but {type(optimizer).__name__} as it was made has no fused form in torch",
            hint="leave fused_optimizer out, and fused and foreach too where you pass them to the optimizer",
        )


def set_tf32(recipe: Recipe, device: torch.device) -> None:
    if recipe.tf32 == "auto" or device.type != "cuda":
        return
    torch.backends.cuda.matmul.allow_tf32 = recipe.tf32
    torch.backends.cudnn.allow_tf32 = recipe.tf32
