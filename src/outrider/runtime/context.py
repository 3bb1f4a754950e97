"""What an epoch callback gets to see and do."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from outrider.runtime.metrics import EpochMetrics


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
    wants_stop: bool = field(default=False, init=False)

    def stop(self) -> None:
        """End the run for all ranks once this epoch is over, or before it when called at its start."""
        self.wants_stop = True
