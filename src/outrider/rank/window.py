"""The work of a rank since its last average, and the cost of averages.

Decides how compute, waiting and averaging are separated. The meter adds times; the facts of a report come from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.policy.effects import AverageReport, RankFacts

NUM_FACTS = 12
BATCHES = 1
"""Where a row of facts holds the number of batches."""
_ORDINAL = 10
"""Where a row of a further average of gradients in the same batch holds its number; the first one has 0 there."""
# How the last fact of a row says that its rank wants the segment to end.
_PAUSE, _STOP, _LAYOUT = 1.0, 2.0, 3.0


@dataclass(slots=True)
class Window:
    """Counters since the last average."""

    samples: int = 0
    batches: int = 0
    compute_s: float = 0.0
    exposed_s: float = 0.0
    """What the previous average, and leases since, took out of the compute path."""
    waited_s: float = 0.0
    """The part of `exposed_s` that waited for an average in the background."""
    average_s: float = 0.0
    busy_s: float = 0.0
    """What the previous average took in the background: until it was done, and of this rank's own processor."""
    setup_s: float = 0.0
    """Steps that say nothing about speed."""

    def stepped(self, *, samples: int, seconds: float, is_steady: bool = True) -> None:
        self.samples += samples
        self.batches += samples > 0
        if is_steady:
            self.compute_s += seconds
        else:
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
        """The row that rides in the averaged buffer; the counters start again. `loss` is a sum and its samples."""
        row = [
            float(self.samples),
            float(self.batches),
            self.compute_s * 1e3,
            self.exposed_s * 1e3,
            self.waited_s * 1e3,
            self.average_s * 1e3,
            self.busy_s * 1e3,
            self.setup_s * 1e3,
            *(loss if math.isfinite(loss[0]) else (0.0, 0)),
            float(is_dry),
            _STOP if wants_stop else _PAUSE if wants_pause else _LAYOUT if wants_layout else 0.0,
        ]
        self.samples = self.batches = 0
        self.compute_s = self.exposed_s = self.setup_s = 0.0
        self.waited_s = self.average_s = self.busy_s = 0.0
        return row


def later_facts(ordinal: int) -> list[float]:
    """The row of an average of gradients that tells the policy nothing: the batch has had one before."""
    return [float(ordinal) if place == _ORDINAL else 0.0 for place in range(NUM_FACTS)]


def ordinals(rows: Sequence[Sequence[float]]) -> list[int]:
    """Of each rank, how many averages of gradients it had in its batch before this one."""
    return [round(row[_ORDINAL]) for row in rows]


def as_report(window: int, rows: tuple[tuple[float, ...], ...], drift: float | None) -> AverageReport:
    return AverageReport(window=window, ranks=tuple(_rank_facts(row) for row in rows), drift=drift)


def _rank_facts(row: tuple[float, ...]) -> RankFacts:
    samples, batches, compute_ms, exposed_ms, waited_ms, average_ms, busy_ms, setup_ms, *rest = row
    loss_sum, loss_samples, is_dry, ending = rest
    return RankFacts(
        samples=round(samples),
        batches=round(batches),
        compute_ms=compute_ms,
        exposed_ms=exposed_ms,
        waited_ms=waited_ms,
        average_ms=average_ms,
        busy_ms=busy_ms,
        setup_ms=setup_ms,
        loss_sum=loss_sum,
        loss_samples=round(loss_samples),
        is_dry=is_dry > 0.5,
        wants_stop=round(ending) == _STOP,
        wants_pause=round(ending) == _PAUSE,
        wants_layout=round(ending) == _LAYOUT,
    )


@dataclass(slots=True)
class AverageAccount:
    """What averages cost over an epoch, split into cost and waiting by what all ranks reported."""

    averages: int = 0
    cost_s: float = 0.0
    wait_s: float = 0.0

    def charge(self, report: AverageReport, rank: int, *, is_blocking: bool) -> None:
        """A report carries what the previous average took from each rank; the last to arrive waited for nobody."""
        exposed = [facts.exposed_ms for facts in report.ranks]
        cost_ms = min(exposed) if is_blocking else exposed[rank]
        self.cost_s += cost_ms / 1e3
        self.wait_s += (exposed[rank] - cost_ms) / 1e3
