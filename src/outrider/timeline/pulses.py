"""Pulses: what a rank did in each half second, for the live page during the run.

Decides the content of a pulse, how pulses are merged, and how a long run keeps a bounded number of them. Does no I/O.
Called by the recorder's thread, by the reader of the live page and by its verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from outrider.timeline.activity import PHASES, ActivityTotals

PERIOD_S = 0.5
SCHEMA_VERSION = 1

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """What one rank did in the `seconds` before `end_s`."""

    end_s: float
    """Seconds since the start of the run."""
    seconds: float
    phase: str
    """The phase at the end of the pulse."""
    phase_s: float = 0.0
    """Time that the rank had been in that phase."""
    spent_s: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    batches: int = 0
    averages: int = 0
    average_s: float = 0.0
    waited_s: float = 0.0
    loss_sum: float = 0.0
    loss_samples: int = 0

    @property
    def start_s(self) -> float:
        return self.end_s - self.seconds


def between(before: ActivityTotals, after: ActivityTotals, *, end_s: float) -> Pulse:
    """The pulse between two readings of a rank's activity."""
    spent_s = {name: max(0.0, after.spent_s[name] - before.spent_s[name]) for name in PHASES}
    return Pulse(
        end_s=end_s,
        seconds=sum(spent_s.values()),
        phase=after.phase,
        phase_s=after.phase_s,
        spent_s={name: seconds for name, seconds in spent_s.items() if seconds > 0},
        samples=after.samples - before.samples,
        batches=after.batches - before.batches,
        averages=after.averages - before.averages,
        average_s=after.average_s - before.average_s,
        waited_s=after.waited_s - before.waited_s,
        loss_sum=after.loss_sum - before.loss_sum,
        loss_samples=after.loss_samples - before.loss_samples,
    )


def joined(pulses: Sequence[Pulse]) -> Pulse:
    """Merge successive pulses into one; counts and times stay exact."""
    last = pulses[-1]
    spent_s = dict.fromkeys(PHASES, 0.0)
    for pulse in pulses:
        for name, seconds in pulse.spent_s.items():
            spent_s[name] += seconds
    return Pulse(
        end_s=last.end_s,
        seconds=sum(pulse.seconds for pulse in pulses),
        phase=last.phase,
        phase_s=last.phase_s,
        spent_s={name: seconds for name, seconds in spent_s.items() if seconds > 0},
        samples=sum(pulse.samples for pulse in pulses),
        batches=sum(pulse.batches for pulse in pulses),
        averages=sum(pulse.averages for pulse in pulses),
        average_s=sum(pulse.average_s for pulse in pulses),
        waited_s=sum(pulse.waited_s for pulse in pulses),
        loss_sum=sum(pulse.loss_sum for pulse in pulses),
        loss_samples=sum(pulse.loss_samples for pulse in pulses),
    )


def thinned(items: Sequence[Item], *, newest: int, join: Callable[[Sequence[Item]], Item]) -> list[Item]:
    """Keep the newest items and merge each pair of older items; the oldest get coarser with every call."""
    older, kept = items[: max(0, len(items) - newest)], items[max(0, len(items) - newest) :]
    return [join(older[i : i + 2]) for i in range(0, len(older), 2)] + list(kept)


# Pulses as lines of a file

_TOTALS = ("samples", "batches", "averages", "loss_samples")
_TIMES = ("average_s", "waited_s", "loss_sum", "phase_s")


def as_line(pulse: Pulse) -> dict[str, Any]:
    """The JSON line of a pulse; zeros are left out."""
    line: dict[str, Any] = {"t": round(pulse.end_s, 3), "s": round(pulse.seconds, 4), "phase": pulse.phase}
    line |= {name: value for name in _TOTALS if (value := getattr(pulse, name))}
    line |= {name: value for name in _TIMES if (value := round(getattr(pulse, name), 5))}
    line["spent_s"] = {name: round(seconds, 4) for name, seconds in pulse.spent_s.items()}
    return line


def parse(line: Mapping[str, Any]) -> Pulse | None:
    """The pulse in a line; None if the line is not a pulse, as in a damaged file."""
    try:
        spent_s = {str(name): float(seconds) for name, seconds in dict(line["spent_s"]).items() if name in PHASES}
        numbers: dict[str, Any] = {name: int(line.get(name, 0)) for name in _TOTALS}
        numbers |= {name: float(line.get(name) or 0.0) for name in _TIMES}
        phase = str(line["phase"])
        pulse = Pulse(end_s=float(line["t"]), seconds=float(line["s"]), phase=phase, spent_s=spent_s, **numbers)
    except (KeyError, TypeError, ValueError):
        return None
    finite = map(math.isfinite, (pulse.end_s, pulse.seconds, pulse.loss_sum, *pulse.spent_s.values()))
    return pulse if all(finite) else None


def joined_lines(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge several lines of one file into one."""
    return as_line(joined([pulse for pulse in map(parse, lines) if pulse is not None]))


def total_spent_s(pulses: Iterable[Pulse]) -> dict[str, float]:
    """Seconds by phase."""
    sums = dict.fromkeys(PHASES, 0.0)
    for pulse in pulses:
        for name, seconds in pulse.spent_s.items():
            sums[name] += seconds
    return sums
