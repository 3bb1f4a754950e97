"""The results of a scaling comparison as plain data: one row per model, way and number of devices.

Decides the references of speed-up and efficiency. Imports no torch. Written by `scaling_measure`, read by
`scaling_text` and `finding`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.bench.scaling.scaling_plan import SINGLE, way_title

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingRow:
    """One way to use some devices; if it could not run, `obstacle` says why and the numbers are None."""

    model: str
    way: str
    devices: tuple[str, ...]
    epoch_s: tuple[float, ...] = ()
    """Per round, all epochs but the first."""
    samples_per_s: float | None = None
    average_part: float | None = None
    """Fraction of the ranks' time that communication took from computing; None if unknown."""
    wait_part: float | None = None
    """Fraction of the ranks' time spent waiting for others."""
    peak_memory_bytes: tuple[int | None, ...] = ()
    obstacle: str | None = None

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def title(self) -> str:
        return way_title(self.way)


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A row compared with the devices alone."""

    row: ScalingRow
    speedup: float | None
    """Against the first device alone."""
    efficiency: float | None
    """Throughput divided by the sum of its devices alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingRecord:
    """A whole comparison."""

    rows: tuple[ScalingRow, ...]
    data_name: str
    batch_size: int
    epochs: int
    rounds: int
    num_samples: int
    environment: Mapping[str, Any]
    commit: str | None = None

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(row.model for row in self.rows))

    def of(self, model: str) -> list[ScalingRow]:
        return [row for row in self.rows if row.model == model]


def solo_speeds(rows: Sequence[ScalingRow]) -> dict[str, float]:
    """Samples per second of every device alone, by its name."""
    return {row.devices[0]: row.samples_per_s for row in rows if row.way == SINGLE and row.samples_per_s is not None}


def standings(rows: Sequence[ScalingRow]) -> list[Standing]:
    """All rows of one model with speed-up and efficiency."""
    solos = solo_speeds(rows)
    first = next(iter(solos.values()), None)
    return [
        Standing(
            row=row,
            speedup=row.samples_per_s / first if row.samples_per_s and first else None,
            efficiency=_efficiency(row, solos),
        )
        for row in rows
    ]


def _efficiency(row: ScalingRow, solos: Mapping[str, float]) -> float | None:
    if row.samples_per_s is None or any(device not in solos for device in row.devices):
        return None
    return row.samples_per_s / sum(solos[device] for device in row.devices)


def document(record: ScalingRecord) -> dict[str, Any]:
    """The comparison for programs."""
    return {"schema_version": SCHEMA_VERSION, "warm_up_epochs": 1, **asdict(record)}
