"""The user's step function compiled by torch, for batches of one size.

Other sizes run uncompiled, because a last batch is not worth another compilation. The user's model is neither wrapped
nor changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from outrider.replica.recipe import StepFunction


class CompiledStep:
    """The step function; it is compiled at the first call."""

    def __init__(self, step: StepFunction, *, samples: int) -> None:
        self._plain = step
        self._compiled: StepFunction = torch.compile(step, dynamic=False)
        self._samples = samples

    def resize(self, samples: int) -> None:
        """Compile for batches of another size from now on."""
        self._samples = samples

    def for_samples(self, samples: int) -> StepFunction:
        return self._compiled if samples == self._samples else self._plain


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether the user has compiled the model or a part of it."""
    return any(hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in model.modules())


def is_compiled_function(function: Callable[..., Any]) -> bool:
    """Whether the user has compiled the function itself."""
    return hasattr(function, "_torchdynamo_orig_callable")
