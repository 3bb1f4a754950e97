"""The work of a rank since its last average, and the cost of averages.

Decides how compute, waiting and averaging are separated. The meter adds times; the facts of a report come from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.policy.effects import AverageReport, RankFacts

NUM_FACTS = 14
BATCHES = 1
"""Index of the number of batches in a row of facts."""
_ORDINAL = 11
"""Index of the ordinal of a further average of gradients in the same batch; the first average has 0 there."""
# Values of a fact by which a rank asks to end the segment.
_PAUSE, _STOP, _LAYOUT = 1.0, 2.0, 3.0


@dataclass(slots=True)
class Window:
    """Counters since the last average."""

    samples: int = 0
    batches: int = 0
    compute_s: float = 0.0
    exposed_s: float = 0.0
    """Time that the previous average, and leases since, took from the compute path."""
    waited_s: float = 0.0
    """The part of `exposed_s` that waited for an average in the background."""
    average_s: float = 0.0
    busy_s: float = 0.0
    """Time of the previous average in the background: until it was done, and on this rank's own processor."""
    setup_s: float = 0.0
    """Time of steps that tell nothing about speed."""
    border_s: float = 0.0
    """Time after the last step of a segment that stayed open, until others had taken theirs."""
    paused_s: float = 0.0
    """Time that the user's loop spent on something other than training, such as an evaluation."""

    def stepped(self, samples: int, seconds: float) -> None:
        """Add a step whose time tells about speed."""
        self.samples += samples
        self.batches += samples > 0
        self.compute_s += seconds

    def set_up(self, samples: int, seconds: float) -> None:
        """Add a step whose time does not."""
        self.samples += samples
        self.batches += samples > 0
        self.setup_s += seconds

    def facts(
        self,
        *,
        loss: tuple[float, int] = (0.0, 0),
        is_dry: bool,
        wants_stop: bool,
        wants_pause: bool = False,
        wants_layout: bool = False,
    ) -> list[float]:
        """The row that travels in the averaged buffer; resets the counters. `loss` is a sum and its sample count."""
        row = [
            float(self.samples),
            float(self.batches),
            self.compute_s * 1e3,
            self.exposed_s * 1e3,
            self.waited_s * 1e3,
            self.average_s * 1e3,
            self.busy_s * 1e3,
            self.setup_s * 1e3,
            self.border_s * 1e3,
            *(loss if math.isfinite(loss[0]) else (0.0, 0)),
            float(is_dry),
            _STOP if wants_stop else _PAUSE if wants_pause else _LAYOUT if wants_layout else 0.0,
            self.paused_s * 1e3,
        ]
        self.samples = self.batches = 0
        self.compute_s = self.exposed_s = self.setup_s = 0.0
        self.waited_s = self.average_s = self.busy_s = self.border_s = self.paused_s = 0.0
        return row


def later_facts(ordinal: int) -> list[float]:
    """The row of a repeated average of gradients in one batch; it tells the policy nothing."""
    return [float(ordinal) if place == _ORDINAL else 0.0 for place in range(NUM_FACTS)]


def ordinals(rows: Sequence[Sequence[float]]) -> list[int]:
    """How many earlier averages of gradients each rank had in its batch."""
    return [round(row[_ORDINAL]) for row in rows]


def as_report(window: int, rows: tuple[tuple[float, ...], ...], drift: float | None) -> AverageReport:
    return AverageReport(window=window, ranks=tuple(_rank_facts(row) for row in rows), drift=drift)


def _rank_facts(row: tuple[float, ...]) -> RankFacts:
    samples, batches, compute_ms, exposed_ms, waited_ms, average_ms, busy_ms, setup_ms, border_ms, *rest = row
    loss_sum, loss_samples, is_dry, ending, paused_ms = rest
    return RankFacts(
        samples=round(samples),
        batches=round(batches),
        compute_ms=compute_ms,
        exposed_ms=exposed_ms,
        waited_ms=waited_ms,
        average_ms=average_ms,
        busy_ms=busy_ms,
        setup_ms=setup_ms,
        border_ms=border_ms,
        paused_ms=paused_ms,
        loss_sum=loss_sum,
        loss_samples=round(loss_samples),
        is_dry=is_dry > 0.5,
        wants_stop=round(ending) == _STOP,
        wants_pause=round(ending) == _PAUSE,
        wants_layout=round(ending) == _LAYOUT,
    )


@dataclass(slots=True)
class AverageAccount:
    """The time of averages over an epoch, split into cost and waiting by the reports of all ranks."""

    averages: int = 0
    cost_s: float = 0.0
    wait_s: float = 0.0

    def charge(self, report: AverageReport, rank: int, *, is_blocking: bool) -> None:
        """Add the times of the previous average from a report.

        The last rank to arrive at a blocking average waited for nobody; for an average in the background every rank
        measures its own wait.
        """
        own = report.ranks[rank]
        blocked_ms = own.exposed_ms - min(facts.exposed_ms for facts in report.ranks)
        waited_ms = blocked_ms if is_blocking else min(own.waited_ms, own.exposed_ms)
        self.cost_s += (own.exposed_ms - waited_ms) / 1e3
        self.wait_s += waited_ms / 1e3
