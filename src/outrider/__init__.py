"""Outrider trains one PyTorch model on devices of unequal speed, so that every device gives what it can.

This is the whole public surface. torch is imported when something that needs it is first used, so that the commands
that look after a machine work where torch is missing or broken.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outrider._version import __version__
from outrider.errors import (
    ConfigError,
    DataError,
    DeviceError,
    OutriderError,
    PeerLostError,
    StepError,
    VerifyError,
    WaitError,
)

if TYPE_CHECKING:
    from outrider.api.builder import Ddp
    from outrider.api.handle import Run, Trained
    from outrider.api.session import Session
    from outrider.api.setup import setup
    from outrider.api.train import train
    from outrider.api.wrap import wrap
    from outrider.average.outer import Outer
    from outrider.flow import Flow
    from outrider.replica.logbook import log
    from outrider.runtime.context import EpochContext
    from outrider.runtime.metrics import EpochMetrics

__all__ = [
    "ConfigError",
    "DataError",
    "Ddp",
    "DeviceError",
    "EpochContext",
    "EpochMetrics",
    "Flow",
    "Outer",
    "OutriderError",
    "PeerLostError",
    "Run",
    "Session",
    "StepError",
    "Trained",
    "VerifyError",
    "WaitError",
    "__version__",
    "log",
    "setup",
    "train",
    "wrap",
]

_HOMES = {
    "Ddp": "outrider.api.builder",
    "EpochContext": "outrider.runtime.context",
    "EpochMetrics": "outrider.runtime.metrics",
    "Flow": "outrider.flow",
    "Outer": "outrider.average.outer",
    "Run": "outrider.api.handle",
    "Session": "outrider.api.session",
    "Trained": "outrider.api.handle",
    "log": "outrider.replica.logbook",
    "setup": "outrider.api.setup",
    "train": "outrider.api.train",
    "wrap": "outrider.api.wrap",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
