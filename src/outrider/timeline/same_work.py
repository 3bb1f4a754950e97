"""Decides which runs can be compared by samples per second: runs that do the same work on the same devices.

Decides which options count. Called when a run is compared with its forecast, and by the live page for its comparison
with `independent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STEP_OPTIONS = (
    "batch_size",
    "batch_sampler",
    "accumulate",
    "micro_batch",
    "precision",
    "execution",
    "memory_format",
    "fused_optimizer",
    "tf32",
    "workers",
    "resident",
    "threads_per_rank",
)
"""Options on which the duration of a step depends."""
AVERAGE_OPTIONS = ("wire", "verify", "average_optimizer", "backend")
"""Options on which the duration of an average depends."""


def has_same_steps(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two records have the same model, data, devices and machine; policies may differ."""
    return (
        one.get("parameters") is not None
        and all(one.get(name) == other.get(name) for name in ("parameters", "num_samples", "devices"))
        and all(_part(one, "options", name) == _part(other, "options", name) for name in STEP_OPTIONS)
        and all(
            _part(one, "environment", name) == _part(other, "environment", name) for name in ("cpu", "gpus", "torch")
        )
    )


def _part(record: Mapping[str, Any], part: str, name: str) -> Any:
    return (record.get(part) or {}).get(name)
