"""The context object that epoch callbacks receive."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from outrider.record.epoch_metrics import EpochMetrics


@dataclass(kw_only=True, slots=True)
class EpochContext:
    """Passed to `epoch_start` and `epoch_end` on every rank; the same on all but for `rank` and `is_main`."""

    epoch: int
    rank: int
    is_main: bool
    model: nn.Module
    optimizer: torch.optim.Optimizer
    metrics: EpochMetrics | None
    """The epoch's numbers; None at its start."""
    samples_seen: int
    """Samples of the whole world since the start of the run."""
    global_step: int
    """`samples_seen` ÷ `batch_size`, as a schedule ticks: the same for every policy and number of ranks."""
    progress: float
    """The finished part of the run, from 0 to 1."""
    wants_stop: bool = field(default=False, init=False)

    def stop(self) -> None:
        """End the run for all ranks after this epoch, or before it if called at its start."""
        self.wants_stop = True
