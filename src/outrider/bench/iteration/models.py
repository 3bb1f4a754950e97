"""What one iteration computes: a model by name or by import, its loss, and a batch of random data for it.

Decides shapes of inputs; nothing is read from disk. Called by the ranks of an iteration benchmark, and by the command
to refuse a name before any rank starts.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.bench.models import imagenet_resnet
from outrider.bench.models.image_models import cross_entropy_step
from outrider.bench.models.text_models import (
    GPT2_CONTEXT,
    GPT2_TOKENS,
    NUM_SYMBOLS,
    WINDOW,
    gpt2_small,
    next_symbol_loss,
)
from outrider.bench.zoo import ENTRIES, Entry
from outrider.errors import ConfigError, did_you_mean
from outrider.replica.recipe import StepFunction

_IMAGENET_NAMES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d")
IMAGENET_MODELS: dict[str, Callable[..., nn.Module]] = {
    name: getattr(imagenet_resnet, name) for name in _IMAGENET_NAMES
}
GPT2 = "gpt2"
NAMES = (*IMAGENET_MODELS, GPT2, *ENTRIES)
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Workload:
    """A model with its loss and the data it takes."""

    model: Callable[[], nn.Module]
    step: StepFunction
    make_inputs: Callable[[int, int], Inputs]
    """From batch size and image size, on the host."""

    def batch(self, batch_size: int, image_size: int, device: torch.device) -> Inputs:
        torch.manual_seed(0)
        return tuple(part.to(device) for part in self.make_inputs(batch_size, image_size))


def workload_named(name: str) -> Workload:
    """A model of the zoo, or `package.module:factory` for one that takes colour images and returns logits."""
    if name in IMAGENET_MODELS:
        return Workload(model=IMAGENET_MODELS[name], step=cross_entropy_step, make_inputs=colour_images)
    if name == GPT2:
        return Workload(model=gpt2_small, step=next_symbol_loss, make_inputs=_windows_of_tokens)
    if name in ENTRIES:
        entry = ENTRIES[name]
        return Workload(model=entry.make_model, step=entry.step, make_inputs=_inputs_of(entry))
    if ":" in name:
        return Workload(model=imported(name), step=cross_entropy_step, make_inputs=colour_images)
    hint = did_you_mean(name, NAMES, otherwise="pick one of them, or pass package.module:factory")
    raise ConfigError(f"no model is called {name!r}, known are: {', '.join(NAMES)}", hint=hint)


def takes_any_size(name: str) -> bool:
    """Whether the image size is for this model; the suite's own take data of one size."""
    return name in IMAGENET_MODELS or ":" in name


def imported(name: str) -> Callable[[], nn.Module]:
    """The factory that `package.module:factory` names; modules of the current folder can be named too."""
    module_name, _, factory_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except ImportError as error:
        raise ConfigError(
            f"model {name!r} cannot be imported: {error}", hint="name it as package.module:factory, from this folder"
        ) from error
    except AttributeError as error:
        raise ConfigError(
            f"model {name!r}: {module_name} has no {factory_name!r}", hint="name a function that returns a module"
        ) from error
    if not callable(factory):
        raise ConfigError(
            f"model {name!r} is no function, it is a {type(factory).__name__}",
            hint="name a function that returns a module",
        )
    model_factory: Callable[[], nn.Module] = factory
    return model_factory


def colour_images(batch_size: int, image_size: int) -> Inputs:
    """Random images, all of class 1, as PyTorch's own benchmark has them."""
    return torch.rand(batch_size, 3, image_size, image_size), torch.ones(batch_size, dtype=torch.long)


def _grey_digits(batch_size: int, image_size: int) -> Inputs:
    return torch.rand(batch_size, 1, 28, 28), torch.ones(batch_size, dtype=torch.long)


def _colour_bytes(batch_size: int, image_size: int) -> Inputs:
    return torch.randint(256, (batch_size, 3, 32, 32), dtype=torch.uint8), torch.ones(batch_size, dtype=torch.long)


def _windows_of_text(batch_size: int, image_size: int) -> Inputs:
    return (torch.randint(NUM_SYMBOLS, (batch_size, WINDOW + 1), dtype=torch.uint8),)


def _windows_of_tokens(batch_size: int, image_size: int) -> Inputs:
    return (torch.randint(GPT2_TOKENS, (batch_size, GPT2_CONTEXT + 1)),)


def _inputs_of(entry: Entry) -> Callable[[int, int], Inputs]:
    """The suite's models take data of one size; the image size is for the others."""
    return {"mnist": _grey_digits, "cifar10": _colour_bytes, "shakespeare": _windows_of_text}[entry.data]
