"""Rejects prepared models that another library averages as well: those wrapped in DistributedDataParallel.

Decides how to detect such a wrapper, even if a trainer adds it later. Called by the replica of a user's loop. Its ranks
take unequal numbers of batches, so averages of DDP would wait for batches that never come.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from outrider.errors import ConfigError

_WRAPS = "DistributedDataParallel is around a prepared model: it averages gradients itself, and so does the session"


def refuse_wrapped(models: Iterable[nn.Module]) -> None:
    """Raise if one of the models is already wrapped."""
    for model in models:
        if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
            raise ConfigError(_WRAPS, hint="pass the model itself, not the wrapper: s.prepare(model.module, optimizer)")


def watch_wrapping(models: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Raise at the first forward pass of a model that was wrapped after it was prepared."""
    return [model.register_forward_pre_hook(_refuse_inside) for model in models]


def _refuse_inside(model: nn.Module, arguments: Any) -> None:
    if DistributedDataParallel._active_ddp_module is not None:
        raise ConfigError(
            _WRAPS,
            hint="leave the wrapper out; accelerate and the Trainer of transformers use one if they find RANK: once "
            "the session is open, delete RANK, LOCAL_RANK and WORLD_SIZE from os.environ",
        )
