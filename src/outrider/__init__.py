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
    from outrider.api.advising import advise
    from outrider.api.ddp_builder import Ddp
    from outrider.api.graph_setup import setup
    from outrider.api.handle import Run, Trained
    from outrider.api.replaying import replay
    from outrider.api.session import Session
    from outrider.api.train import train
    from outrider.api.train_in_lab import lab
    from outrider.api.wrap import wrap
    from outrider.average.outer import Outer
    from outrider.flow import Flow
    from outrider.rank.epoch_context import EpochContext
    from outrider.record.epoch_metrics import EpochMetrics
    from outrider.replica.logged_scalars import log
    from outrider.virtual.advice import Advice
    from outrider.virtual.lab import LabRun
    from outrider.virtual.simulator import DeviceSpeed, Network, Outcome, Scenario, simulate

__all__ = [
    "Advice",
    "ConfigError",
    "DataError",
    "Ddp",
    "DeviceError",
    "DeviceSpeed",
    "EpochContext",
    "EpochMetrics",
    "Flow",
    "LabRun",
    "Network",
    "Outcome",
    "Outer",
    "OutriderError",
    "PeerLostError",
    "Run",
    "Scenario",
    "Session",
    "StepError",
    "Trained",
    "VerifyError",
    "WaitError",
    "__version__",
    "advise",
    "lab",
    "log",
    "replay",
    "setup",
    "simulate",
    "train",
    "wrap",
]

_HOMES = {
    "Advice": "outrider.virtual.advice",
    "Ddp": "outrider.api.ddp_builder",
    "DeviceSpeed": "outrider.virtual.simulator",
    "EpochContext": "outrider.rank.epoch_context",
    "EpochMetrics": "outrider.record.epoch_metrics",
    "Flow": "outrider.flow",
    "LabRun": "outrider.virtual.lab",
    "Network": "outrider.virtual.simulator",
    "Outcome": "outrider.virtual.simulator",
    "Outer": "outrider.average.outer",
    "Run": "outrider.api.handle",
    "Scenario": "outrider.virtual.simulator",
    "Session": "outrider.api.session",
    "Trained": "outrider.api.handle",
    "advise": "outrider.api.advising",
    "lab": "outrider.api.train_in_lab",
    "log": "outrider.replica.logged_scalars",
    "replay": "outrider.api.replaying",
    "setup": "outrider.api.graph_setup",
    "simulate": "outrider.virtual.simulator",
    "train": "outrider.api.train",
    "wrap": "outrider.api.wrap",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    try:
        home = importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError(
            f"outrider.{name} needs torch, and no torch is installed",
            hint="`outrider setup` installs the build that fits this machine, pip install 'outrider[torch]' a default",
        ) from error
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
