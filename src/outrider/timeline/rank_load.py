"""Sums the pulses of a rank over some time: its rate, its own pace, and how it spent its time.

Decides which seconds count as training and which as waiting. Does no I/O. Called by the verdict and by the live page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.timeline.pulses import Pulse, total_spent_s

TRAINING = ("compute", "data", "join", "average")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLoad:
    """Sums over pulses of one rank."""

    spent_s: Mapping[str, float]
    samples: int
    batches: int
    averages: int
    average_s: float
    """Total duration of the averages, including background averages."""
    waited_s: float

    @property
    def training_s(self) -> float:
        """Time in which the rank trained, including its averages and waits."""
        return sum(self.spent_s[name] for name in TRAINING)

    @property
    def present_s(self) -> float:
        """Time in which the run trained: the rank's training time and its rests."""
        return self.training_s + self.spent_s["rest"]

    @property
    def own_s(self) -> float:
        """Time of the rank's own steps, including data."""
        return self.spent_s["compute"] + self.spent_s["data"]

    @property
    def pace(self) -> float | None:
        """Samples per second of the rank's own steps; None without samples."""
        return self.samples / self.own_s if self.samples and self.own_s > 0 else None

    @property
    def compute_s_per_sample(self) -> float | None:
        return self.spent_s["compute"] / self.samples if self.samples else None

    @property
    def compute_s_per_batch(self) -> float | None:
        return self.spent_s["compute"] / self.batches if self.batches else None

    def part(self, phase: str) -> float:
        """The fraction of its training time that the rank spent in a phase."""
        return self.spent_s[phase] / self.training_s if self.training_s > 0 else 0.0


def load_of(pulses: Iterable[Pulse]) -> RankLoad:
    known = list(pulses)
    return RankLoad(
        spent_s=total_spent_s(known),
        samples=sum(pulse.samples for pulse in known),
        batches=sum(pulse.batches for pulse in known),
        averages=sum(pulse.averages for pulse in known),
        average_s=sum(pulse.average_s for pulse in known),
        waited_s=sum(pulse.waited_s for pulse in known),
    )


def since(pulses: Sequence[Pulse], start_s: float) -> list[Pulse]:
    """The newest pulses, which all began at or after `start_s`."""
    first = len(pulses)
    while first > 0 and pulses[first - 1].start_s >= start_s - 1e-6:
        first -= 1
    return list(pulses[first:])


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldLoad:
    """The throughput of all ranks together."""

    rate: float | None
    """Samples per second of training time."""
    pace_sum: float | None
    """Samples per second if every rank took steps all the time."""
    best_pace: float | None
    """The pace of the fastest rank."""

    @property
    def efficiency(self) -> float | None:
        return self.rate / self.pace_sum if self.rate is not None and self.pace_sum else None

    @property
    def gain(self) -> float | None:
        """The speedup of all ranks over the fastest rank alone."""
        return self.rate / self.best_pace if self.rate is not None and self.best_pace else None


def world_load(recent: Mapping[int, RankLoad], *, paces: Mapping[int, float]) -> WorldLoad:
    """Combine the loads of all ranks; `paces` are earlier paces, used for ranks that rest."""
    present = [load.present_s for load in recent.values() if load.present_s > 0]
    samples = sum(load.samples for load in recent.values())
    known = {rank: load.pace or paces.get(rank) for rank, load in recent.items()}
    values = [pace for pace in known.values() if pace]
    return WorldLoad(
        rate=samples / (sum(present) / len(present)) if present and samples else None,
        pace_sum=sum(values) if values and len(values) == len(recent) else None,
        best_pace=max(values, default=None),
    )
