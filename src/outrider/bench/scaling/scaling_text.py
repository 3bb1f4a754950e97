"""A scaling comparison as text: a table per model, then what could not run and why.

Decides words and layout only. Called by `outrider bench scaling`.
"""

from __future__ import annotations

from statistics import fmean

from outrider.bench.scaling.finding import finding, mean_peak_bytes
from outrider.bench.scaling.scaling_record import ScalingRecord, Standing, standings
from outrider.bench.tables import UNKNOWN, number, text_table

HEADERS = ("way", "devices", "s/epoch", "samples/s", "speed-up", "efficiency", "average", "wait", "memory/rank")


def render(record: ScalingRecord) -> str:
    """The whole comparison, ending with the finding."""
    parts = [_conditions(record)]
    for model in record.models:
        ran = [one for one in standings(record.of(model)) if one.row.obstacle is None]
        parts.append(f"{model}\n{text_table(HEADERS, [_cells(one) for one in ran], num_names=2)}")
    obstacles = [
        f"{row.model}, {row.title} on {row.num_devices} devices cannot run here: {row.obstacle}"
        for row in record.rows
        if row.obstacle is not None
    ]
    parts += ["\n".join(obstacles)] if obstacles else []
    parts.append("\n".join(finding(record)))
    return "\n\n".join(parts)


def _conditions(record: ScalingRecord) -> str:
    return (
        f"{record.data_name}, {record.num_samples:,} samples per epoch, batch {record.batch_size} per device, "
        f"SGD 0.1 with momentum 0.9 and weight decay 5e-4, crop and flip; "
        f"times are of {record.epochs} epochs without the first"
    )


def _cells(standing: Standing) -> list[str]:
    row = standing.row
    peak = mean_peak_bytes(row)
    return [
        row.title,
        ",".join(row.devices),
        f"{fmean(row.epoch_s):.2f}" if row.epoch_s else UNKNOWN,
        number(row.samples_per_s, ",.0f"),
        number(standing.speedup, ".2f"),
        number(standing.efficiency, ".0%"),
        number(row.average_part, ".1%"),
        number(row.wait_part, ".1%"),
        UNKNOWN if peak is None else f"{peak / 1e6:,.0f} MB",
    ]
