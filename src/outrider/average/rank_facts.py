"""Decides how the facts of the ranks are encoded at the end of a summed buffer, and what an average reports.

Does not interpret the facts. Called by Exchange and GradientExchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """The report of an average; facts, samples and drift are bit-identical on all ranks."""

    facts: tuple[tuple[float, ...], ...]
    """The facts of each rank, in rank order."""
    total_samples: int
    drift: float | None = None
    """Weighted root mean square of ‖x_r − mean‖ / ‖mean‖ over parameters; None for averages of gradients."""
    effective_ranks: float = 1.0
    """The effective number of ranks, 1/Σ w², over the samples of the last windows."""
    not_finite: tuple[int, ...] = ()
    """Ranks whose gradients or displacements were not finite; then the mean is not finite either, unless dropped."""
    snapshot_ms: float | None = None
    """Time from the start of the snapshot until its copy can be read."""
    transfer_ms: float | None = None
    """Time in the collective, including the wait for other ranks."""
    total_ms: float | None = None
    """Time from the start of the snapshot until the result can be applied."""
    waited_ms: float | None = None
    """Time that the rank waited for the result of an average in the background."""
    busy_ms: float | None = None
    """Processor time of an average in the background, where the same processor computes the steps."""


class Tail:
    """One row of numbers per rank in a buffer that is summed: each rank fills its own row, so the sum gathers them.

    A number takes two slots: its value rounded to the buffer's dtype, and the remainder. float32 alone would round
    sample counts above 2**24; the pair holds 48 bits. The first number of a row is the rank's samples.
    """

    def __init__(self, *, rank: int, world_size: int, num_values: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.num_values = num_values

    @property
    def num_slots(self) -> int:
        return self.world_size * self.num_values * 2

    def own_row(self, slots: Tensor) -> Tensor:
        """The rank's own row, with shape (values, 2)."""
        return slots.view(self.world_size, self.num_values, 2)[self.rank]

    def encode(self, values: Sequence[float], into: Tensor) -> None:
        """Write `values` into `into`, a host tensor of shape (len(values), 2)."""
        exact, row = np.array(values, dtype=np.float64), into.numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            row[:, 0] = exact
            rest = exact - row[:, 0]
            row[:, 1] = np.where(np.isfinite(rest), rest, 0.0)

    def total_samples(self, slots: Tensor) -> Tensor:
        """The samples of all ranks as a float64 scalar on the buffer's device; exact in any summation order."""
        return self.samples(slots).sum()

    def samples(self, slots: Tensor) -> Tensor:
        return self.column(slots, 0)

    def column(self, slots: Tensor, number: int) -> Tensor:
        """One number of each rank, as float64 on the buffer's device."""
        return slots.view(self.world_size, self.num_values, 2)[:, number].double().sum(dim=1)

    def decode(self, slots: Tensor) -> list[list[float]]:
        """The values of each rank; `slots` is on the host."""
        pairs = slots.numpy().astype(np.float64).reshape(self.world_size, self.num_values, 2)
        rows: list[list[float]] = (pairs[:, :, 0] + pairs[:, :, 1]).tolist()
        return rows


def drift(
    *, samples: Sequence[float], displacements: Sequence[float], norms: Sequence[float], mean_displacement: float
) -> float:
    """Compute the drift from squared norms: of each rank's displacement and parameters, and of the mean displacement.

    The weighted variance is the mean of the squares minus the square of the mean. ‖mean‖² is then the weighted mean of
    ‖u_r‖² minus that variance. The drift is infinite if a rank diverged.
    """
    total = sum(samples)
    if total == 0:
        return 0.0
    variance = math.fsum(s * d for s, d in zip(samples, displacements, strict=True)) / total - mean_displacement
    mean_norm = math.fsum(s * n for s, n in zip(samples, norms, strict=True)) / total - variance
    if not (math.isfinite(variance) and math.isfinite(mean_norm)):
        return math.inf
    if variance <= 0:
        return 0.0
    return math.sqrt(variance / mean_norm) if mean_norm > 0 else math.inf
