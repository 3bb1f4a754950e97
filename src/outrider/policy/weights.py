"""Normalises counts and options of the ranks to weights that sum to one.

Does not decide which rank gets which samples; planner and splitter do.
Called by the policies for the weights of an average, and by planner and split for the options of the user.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.errors import ConfigError

LEAST_SPEED = 1 / 16
"""Part of the fastest: a short measurement says little about the model, and a rank needs samples to be measured."""


def weights(samples: Sequence[int]) -> tuple[float, ...]:
    """Each rank's part of all samples since the last average; all zero if no rank moved."""
    total = sum(samples)
    if total == 0:
        return (0.0,) * len(samples)
    return tuple(count / total for count in samples)


def proportions(name: str, values: Sequence[float], *, world_size: int) -> tuple[float, ...]:
    """Checks an option that has one positive number per rank, and scales it to a sum of one."""
    if len(values) != world_size:
        raise ConfigError(
            f"{name} must have one entry per rank, got {len(values)} for world_size={world_size}",
            hint=f"give {world_size} numbers or leave {name} out",
        )
    if not all(math.isfinite(value) and value > 0 for value in values):
        listed = ", ".join(f"{value:g}" for value in values)
        raise ConfigError(
            f"{name} must be positive numbers, got {listed}",
            hint="leave a device out of devices to give it nothing",
        )
    total = math.fsum(values)
    return tuple(value / total for value in values)


def relative_speeds(speeds: Sequence[float]) -> tuple[float, ...]:
    """Speeds as parts of the fastest, none below `LEAST_SPEED`."""
    fastest = max(speeds)
    return tuple(max(LEAST_SPEED, speed / fastest) for speed in speeds)
