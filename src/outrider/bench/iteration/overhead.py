"""What one runtime costs more than another, from blocks of iterations that took turns in the same processes.

Decides how blocks are paired and what their ratio is. Called by the text of an iteration benchmark and its record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from outrider.bench.iteration.plan import BLOCK
from outrider.bench.iteration.record import Timing
from outrider.bench.statistics import Interval, bootstrap_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """How much longer an iteration takes, as a part of the other's; negative is quicker."""

    part: float
    """Median over the pairs of blocks."""
    interval: Interval | None
    """Of the median, with 95 % confidence; None where there is one pair only."""
    num_blocks: int

    def against(self, name: str) -> str:
        """In words, such as `0.4 % slower per iteration than torch DDP (…)`."""
        span = ""
        if self.interval is not None:
            span = f", 95 % interval {100 * self.interval.low:+.1f} % to {100 * self.interval.high:+.1f} %"
        blocks = f"{self.num_blocks} pair{'' if self.num_blocks == 1 else 's'} of interleaved blocks"
        direction = "slower" if self.part > 0 else "quicker"
        return f"{100 * abs(self.part):.1f} % {direction} per iteration than {name} ({blocks}{span})"


def overhead(ours: Timing, theirs: Timing) -> Overhead:
    """`ours` against `theirs`, measured in the same processes."""
    parts = [mine / other - 1 for mine, other in zip(_blocks(ours), _blocks(theirs), strict=True)]
    return Overhead(
        part=median(parts),
        interval=bootstrap_interval([parts], lambda groups: median(groups[0])),
        num_blocks=len(parts),
    )


def _blocks(timing: Timing) -> list[float]:
    """The median iteration of each block: one that the system disturbed says nothing about a runtime."""
    return [median(block) for times in timing.iterations() for block in _cut(times)]


def _cut(times: Sequence[float]) -> Iterator[Sequence[float]]:
    for start in range(0, len(times), BLOCK):
        yield times[start : start + BLOCK]


def mean_s(timing: Timing) -> float:
    return fmean(timing.measurements)
