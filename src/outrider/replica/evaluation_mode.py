"""Puts models into evaluation mode temporarily.

Every module returns to its previous mode, so a layer that the user froze stays frozen. Called around every evaluation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from outrider.replica.logged_scalars import not_recording


@contextlib.contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    were_training = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        with not_recording():
            yield
    finally:
        for module, was_training in were_training:
            module.training = was_training
