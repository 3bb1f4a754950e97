"""Puts models into evaluation mode for a while.

Decides that every module goes back to the mode it was in: a layer that the user froze stays frozen. Called wherever a
user's evaluation runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn


@contextlib.contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    were_training = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, was_training in were_training:
            module.training = was_training
