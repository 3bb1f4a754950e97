"""What a rank has done since its last average, and what averages cost it.

Decides how compute, waiting and averaging are told apart. The driver feeds it times; a report's facts come from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.effects import RankFacts, Report

NUM_FACTS = 7
BATCHES = 1
"""Where a row of facts holds the number of batches."""


@dataclass(slots=True)
class Window:
    """Counters since the last average."""

    samples: int = 0
    batches: int = 0
    compute_s: float = 0.0
    exposed_s: float = 0.0
    """What the previous average, and leases since, took out of the compute path."""
    setup_s: float = 0.0
    """Steps that say nothing about speed."""

    def stepped(self, *, samples: int, seconds: float, is_steady: bool = True) -> None:
        self.samples += samples
        self.batches += samples > 0
        if is_steady:
            self.compute_s += seconds
        else:
            self.setup_s += seconds

    def facts(self, *, is_dry: bool, wants_stop: bool) -> list[float]:
        """The row that rides in the averaged buffer; the counters start again."""
        row = [
            float(self.samples),
            float(self.batches),
            self.compute_s * 1e3,
            self.exposed_s * 1e3,
            self.setup_s * 1e3,
            float(is_dry),
            float(wants_stop),
        ]
        self.samples = self.batches = 0
        self.compute_s = self.exposed_s = self.setup_s = 0.0
        return row


def as_report(window: int, rows: tuple[tuple[float, ...], ...], drift: float | None) -> Report:
    return Report(window=window, ranks=tuple(_rank_facts(row) for row in rows), drift=drift)


def _rank_facts(row: tuple[float, ...]) -> RankFacts:
    samples, batches, compute_ms, exposed_ms, setup_ms, is_dry, wants_stop = row
    return RankFacts(
        samples=round(samples),
        batches=round(batches),
        compute_ms=compute_ms,
        exposed_ms=exposed_ms,
        setup_ms=setup_ms,
        is_dry=is_dry > 0.5,
        wants_stop=wants_stop > 0.5,
    )


@dataclass(slots=True)
class AverageAccount:
    """What averages cost over an epoch, split into cost and waiting by what all ranks reported."""

    averages: int = 0
    cost_s: float = 0.0
    wait_s: float = 0.0

    def charge(self, report: Report, rank: int, *, is_blocking: bool) -> None:
        """A report carries what the previous average took from each rank; the last to arrive waited for nobody."""
        exposed = [facts.exposed_ms for facts in report.ranks]
        cost_ms = min(exposed) if is_blocking else exposed[rank]
        self.cost_s += cost_ms / 1e3
        self.wait_s += (exposed[rank] - cost_ms) / 1e3
