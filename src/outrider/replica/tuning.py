"""What makes steps faster without changing what the user wrote: precision, memory format, fused optimizers, TF32.

Decides whether the model runs in channels_last, by trying it; the others are options with measured defaults
(docs/log.md). Called when a replica is made, and by the rank before that.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outrider.errors import ConfigError
from outrider.replica.logbook import Logbook, writing
from outrider.replica.rates import fuse
from outrider.replica.recipe import Recipe
from outrider.replica.snapshot import HostRandomness

if TYPE_CHECKING:
    from outrider.replica.replica import Replica

TENSOR_CORES = (7, 0)
"""From this compute capability on, convolutions were measured to be faster in channels_last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatChoice:
    """channels_last or contiguous, and why."""

    value: str
    reason: str


def choose_memory_format(replica: Replica, batch: Any) -> FormatChoice:
    """What suits this device; all ranks must then take the same, since flat arenas are summed element by element."""
    asked, device = replica.recipe.memory_format, replica.device
    if asked != "auto":
        return FormatChoice(value=asked, reason=f"memory_format={asked} was given")
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < TENSOR_CORES:
        return FormatChoice(value="contiguous", reason=f"{replica.name} has no tensor cores")
    if not any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in replica.model.modules()):
        return FormatChoice(value="contiguous", reason="the model has no convolutions over images")
    randomness = HostRandomness()
    try:
        return _tried(replica, batch)
    finally:
        randomness.restore()


def _tried(replica: Replica, batch: Any) -> FormatChoice:
    model = copy.deepcopy(replica.model)
    to_channels_last(model)
    try:
        with writing(Logbook(), samples=1), replica.autocast():
            loss = replica.recipe.step(model, batch)
        loss.backward()
    except Exception as error:  # an error of the user's own comes again in the first step, and is reported there
        lines = str(error).splitlines() or [""]
        return FormatChoice(value="contiguous", reason=f"the step does not bear channels_last: {lines[0]}")
    return FormatChoice(value="channels_last", reason="convolutions over images on tensor cores")


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """In which the user's functions run."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def to_channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's annotations leave it out


def agree(choices: list[FormatChoice]) -> FormatChoice:
    """What all ranks can take."""
    for rank, choice in enumerate(choices):
        if choice.value != choices[0].value:
            other = choice if choice.value == "contiguous" else choices[0]
            return FormatChoice(value="contiguous", reason=f"for rank {rank} beside rank 0: {other.reason}")
    return choices[0]


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
