"""The user's step function compiled by torch, for the batches of one size.

Decides that other sizes run uncompiled: a last batch is not worth the seconds of another compilation. The model that
the user wrote is not wrapped or changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from outrider.replica.recipe import StepFunction


class CompiledStep:
    """Compiled when it is called first."""

    def __init__(self, step: StepFunction, *, samples: int) -> None:
        self._plain = step
        self._compiled: StepFunction = torch.compile(step, dynamic=False)
        self._samples = samples

    def for_samples(self, samples: int) -> StepFunction:
        return self._compiled if samples == self._samples else self._plain
