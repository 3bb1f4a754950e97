"""How much of the processor other programs used while something was measured.

Decides what counts as others: everything that is neither this process nor one that it started and saw end.
Called around an iteration benchmark, whose file keeps it, because the comparison of two files must know.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorTime:
    """Seconds of all cores since the machine started, and those that were ours."""

    busy_s: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> ProcessorTime:
        times = psutil.cpu_times()
        # Linux counts guests twice, once as their host's user time.
        all_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        own = os.times()
        own_s = own.user + own.system + own.children_user + own.children_system
        return cls(busy_s=all_s - idle_s, all_s=all_s, own_s=own_s)


def others_part(before: ProcessorTime, after: ProcessorTime) -> float | None:
    """The part of all cores that others used in between; None where no time has passed."""
    all_s = after.all_s - before.all_s
    if all_s <= 0:
        return None
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others_s / all_s))
