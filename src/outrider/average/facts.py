"""Decides how small facts ride in the tail of a summed buffer, and what an average reports.

Does not know what the facts mean. Called by Exchange and GradientExchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """What all ranks know after an average; facts, samples and drift are bit-identical on each."""

    facts: tuple[tuple[float, ...], ...]
    """The facts of each rank, in rank order."""
    total_samples: int
    drift: float | None = None
    """Weighted root mean square of ‖x_r − mean‖ / ‖mean‖ over parameters; None where gradients were averaged."""
    effective_ranks: float = 1.0
    """How many equal ranks would share the samples of the last windows as unequally as these did."""
    snapshot_ms: float | None = None
    """From the start of the snapshot until its copy can be read."""
    transfer_ms: float | None = None
    """Inside the collective: waiting for the other ranks included."""
    total_ms: float | None = None
    """From the start of the snapshot until the result is there to be taken in."""


class Tail:
    """One row of numbers per rank in a buffer that is summed: each rank fills its own row, so the sum gathers them.

    A number takes two slots, its value rounded to the buffer's dtype and the rest: float32 alone would round sample
    counts above 2**24, the pair holds 48 bits. The first number of a row is the rank's samples.
    """

    def __init__(self, *, rank: int, world_size: int, num_values: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.num_values = num_values

    @property
    def num_slots(self) -> int:
        return self.world_size * self.num_values * 2

    def own_row(self, slots: Tensor) -> Tensor:
        """The rank's own row as (values, 2)."""
        return slots.view(self.world_size, self.num_values, 2)[self.rank]

    def encode(self, values: Sequence[float], into: Tensor) -> None:
        """Write `values` into `into`, a host tensor of shape (len(values), 2)."""
        exact, row = np.array(values, dtype=np.float64), into.numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            row[:, 0] = exact
            rest = exact - row[:, 0]
            row[:, 1] = np.where(np.isfinite(rest), rest, 0.0)

    def total_samples(self, slots: Tensor) -> Tensor:
        """The sum over ranks as a float64 scalar on the buffer's device; exact in any order of summation."""
        return self.samples(slots).sum()

    def samples(self, slots: Tensor) -> Tensor:
        """Of each rank, float64, on the buffer's device."""
        return slots.view(self.world_size, self.num_values, 2)[:, 0].double().sum(dim=1)

    def decode(self, slots: Tensor) -> list[list[float]]:
        """The values of each rank; `slots` is on the host."""
        pairs = slots.double().view(self.world_size, self.num_values, 2)
        rows: list[list[float]] = pairs.sum(dim=2).tolist()
        return rows


def drift(
    *, samples: Sequence[float], displacements: Sequence[float], norms: Sequence[float], mean_displacement: float
) -> float:
    """Drift from squared norms alone: of each rank's displacement and parameters, and of the mean displacement.

    The weighted variance is the mean of the squares less the square of the mean; ‖mean‖² is then the weighted mean of
    ‖u_r‖² less that variance. Infinite where a rank diverged.
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
