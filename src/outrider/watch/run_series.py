"""The charts of the live page as columns of numbers: a bounded number of points, however long the run.

Decides the length of a point's time and how pulses are spread over points. Does no I/O. Called by the view of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.timeline.pulses import Pulse

MAX_POINTS = 240
MAX_NUMBERS = 12_000
"""Of all charts together: worlds of many ranks get fewer points."""
_WIDTHS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
_SERIES_PER_RANK = 5

Column = list[float | None]


@dataclass(slots=True)
class _Bin:
    """What one rank did in the time of one point."""

    own_s: float = 0.0
    seconds: float = 0.0
    samples: float = 0.0
    loss_sum: float = 0.0
    loss_samples: float = 0.0
    percents: list[float] = field(default_factory=list)


def width_s(end_s: float, *, num_ranks: int) -> float:
    """Seconds per point: a round number, so that points stay where they are while the run goes on."""
    most = max(20, min(MAX_POINTS, MAX_NUMBERS // (_SERIES_PER_RANK * max(1, num_ranks) + 4)))
    for width in _WIDTHS_S:
        if end_s / width <= most:
            return float(width)
    return end_s / most


def series(
    pulses: Mapping[int, Sequence[Pulse]],
    *,
    end_s: float,
    percents: Mapping[int, Sequence[tuple[float, float]]],
) -> dict[str, Any]:
    """Columns for the charts; `percents` are times and utilizations of the ranks' devices."""
    ranks = sorted(pulses)
    width = width_s(end_s, num_ranks=len(ranks))
    # The last point is still filling: it would look like a drop.
    num = max(1, int(end_s / width))
    bins = {rank: [_Bin() for _ in range(num)] for rank in ranks}
    for rank in ranks:
        for pulse in pulses[rank]:
            _spread(pulse, bins[rank], width)
        for at_s, percent in percents.get(rank, ()):
            if 0 <= int(at_s / width) < num:
                bins[rank][int(at_s / width)].percents.append(percent)
    first = _first_used(bins, num)
    bins = {rank: one[first:] for rank, one in bins.items()}
    kept = range(num - first)
    return {
        "t": [round((first + i + 1) * width, 3) for i in kept],
        "seen": _seen(bins, len(kept)),
        "loss": [_loss([bins[rank][i] for rank in ranks]) for i in kept],
        "rate": [_significant(sum(bins[rank][i].samples for rank in ranks) / width) for i in kept],
        "ranks": [_columns(rank, bins, width) for rank in ranks],
    }


def _first_used(bins: Mapping[int, list[_Bin]], num: int) -> int:
    """Charts begin when the first rank takes its first steps."""
    firsts = (i for i in range(num) if any(one[i].samples > 0 for one in bins.values()))
    return next(firsts, num)


def _spread(pulse: Pulse, bins: list[_Bin], width: float) -> None:
    """Older pulses are longer than a point and count in several, in proportion."""
    if pulse.seconds <= 0:
        return
    own_s = pulse.spent_s.get("compute", 0.0) + pulse.spent_s.get("data", 0.0)
    first, last = max(0, int(pulse.start_s / width)), int(max(0.0, pulse.end_s - 1e-9) / width)
    for index in range(first, min(last, len(bins) - 1) + 1):
        overlap_s = min(pulse.end_s, (index + 1) * width) - max(pulse.start_s, index * width)
        part = max(0.0, overlap_s) / pulse.seconds
        one = bins[index]
        one.own_s += part * own_s
        one.seconds += part * pulse.seconds
        one.samples += part * pulse.samples
        one.loss_sum += part * pulse.loss_sum
        one.loss_samples += part * pulse.loss_samples


def _seen(bins: Mapping[int, list[_Bin]], num: int) -> Column:
    """Samples of all ranks up to each point."""
    total, column = 0.0, []
    for index in range(num):
        total += sum(one[index].samples for one in bins.values())
        column.append(float(round(total)))
    return list(column)


def _loss(bins: Sequence[_Bin]) -> float | None:
    samples = sum(one.loss_samples for one in bins)
    return _significant(sum(one.loss_sum for one in bins) / samples, 6) if samples > 0 else None


def _columns(rank: int, bins: Mapping[int, list[_Bin]], width: float) -> dict[str, Any]:
    mine = bins[rank]
    totals = [sum(one[i].samples for one in bins.values()) for i in range(len(mine))]
    return {
        "rank": rank,
        "rate": [_significant(one.samples / width) if one.seconds > 0 else None for one in mine],
        "pace": [_significant(one.samples / one.own_s) if one.samples > 0 and one.own_s > 0 else None for one in mine],
        "share": [
            round(100 * one.samples / total, 1) if total else None for one, total in zip(mine, totals, strict=True)
        ],
        "percent": [round(sum(one.percents) / len(one.percents), 1) if one.percents else None for one in mine],
    }


def _significant(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")
