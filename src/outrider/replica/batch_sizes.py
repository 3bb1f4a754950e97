"""The batch sizes of ranks: one for all, one per rank, or one per device.

Decides which forms are valid, and for which policies. The average weights each rank by its samples, so ranks with
batches of different sizes need nothing else. Called by the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import ConfigError
from outrider.policy.policies import LOCAL_STEP_POLICIES, PolicySpec

BatchSizes = int | tuple[int, ...] | dict[str, int]
"""Samples per step: of every rank, of each rank in the order of devices, or of each device by name."""


def sizes_of(value: BatchSizes) -> tuple[int, ...]:
    """All batch sizes in the option."""
    if isinstance(value, int):
        return (value,)
    return tuple(value.values()) if isinstance(value, Mapping) else value


def mean_size(value: BatchSizes) -> int:
    """The mean over ranks, as a whole number: the unit of schedule ticks and of `steps=`."""
    sizes = sizes_of(value)
    return max(1, round(sum(sizes) / len(sizes)))


def check_batch_size(value: Any, policy: PolicySpec) -> None:
    """Raise for invalid sizes, and for sizes per rank if ranks share steps."""
    sizes: Sequence[Any] = list(value.values()) if isinstance(value, Mapping) else value
    for size in [value] if isinstance(value, int) or not isinstance(sizes, list | tuple) or not sizes else sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"batch_size must be a whole number >= 1, got {size!r}", hint="pass batch_size=1 or more")
    if isinstance(value, int) or not policy.shares_steps:
        return
    if policy.switches:
        reason, hint = "begins with the steps of one device", f"choose another policy: {', '.join(LOCAL_STEP_POLICIES)}"
    elif policy.batch_is_global:
        reason, hint = "splits one batch of all ranks", "pass one batch_size, and shares=[0.75, 0.25] to fix the split"
    else:
        reason, hint = "gives every rank an equal batch", f"choose another policy: {', '.join(LOCAL_STEP_POLICIES)}"
    raise ConfigError(f"batch_size has one value per rank, but policy {policy.name!r} {reason}", hint=hint)


def by_rank(sizes: Mapping[str, int], devices: Sequence[str]) -> tuple[int, ...]:
    """The sizes in the order of devices."""
    for name in (*devices, *sizes):
        if name not in sizes or name not in devices:
            raise ConfigError(
                f"batch_size names {', '.join(sizes)}, the devices are {', '.join(devices)}",
                hint="name every device as it is written in devices, or pass a list in their order",
            )
    return tuple(sizes[name] for name in devices)
