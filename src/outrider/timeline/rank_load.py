"""What pulses say about a rank over some time: its rate, its own pace, and what its time went to.

Decides which seconds count as training and which as waiting. Does no I/O. Called by the verdict and by the live page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.timeline.pulses import Pulse, total_spent_s

TRAINING = ("compute", "data", "join", "average")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLoad:
    """The sums over some pulses of one rank."""

    spent_s: Mapping[str, float]
    samples: int
    batches: int
    averages: int
    average_s: float
    """Duration of the averages, also where they ran in the background."""
    waited_s: float

    @property
    def training_s(self) -> float:
        """Time in which the rank trained, its averages and waits included."""
        return sum(self.spent_s[name] for name in TRAINING)

    @property
    def present_s(self) -> float:
        """The same with rests: time in which the run trained."""
        return self.training_s + self.spent_s["rest"]

    @property
    def own_s(self) -> float:
        """Time of its own steps, data included."""
        return self.spent_s["compute"] + self.spent_s["data"]

    @property
    def pace(self) -> float | None:
        """Samples per second that the rank reaches while it steps; None without samples."""
        return self.samples / self.own_s if self.samples and self.own_s > 0 else None

    @property
    def compute_s_per_sample(self) -> float | None:
        return self.spent_s["compute"] / self.samples if self.samples else None

    @property
    def compute_s_per_batch(self) -> float | None:
        return self.spent_s["compute"] / self.batches if self.batches else None

    def part(self, phase: str) -> float:
        """The part of its training time that went to a phase."""
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
    """The newest pulses, back to the first that began before `start_s`."""
    first = len(pulses)
    while first > 0 and pulses[first - 1].start_s >= start_s - 1e-6:
        first -= 1
    return list(pulses[first:])


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldLoad:
    """All ranks together."""

    rate: float | None
    """Samples per second of training time."""
    pace_sum: float | None
    """The same if every rank stepped all the time."""
    best_pace: float | None
    """The pace of the fastest rank."""

    @property
    def efficiency(self) -> float | None:
        return self.rate / self.pace_sum if self.rate is not None and self.pace_sum else None

    @property
    def gain(self) -> float | None:
        """How much faster all ranks are than the fastest one without the others."""
        return self.rate / self.best_pace if self.rate is not None and self.best_pace else None


def world_load(recent: Mapping[int, RankLoad], *, paces: Mapping[int, float]) -> WorldLoad:
    """`paces` are those of earlier times, for ranks that rest."""
    present = [load.present_s for load in recent.values() if load.present_s > 0]
    samples = sum(load.samples for load in recent.values())
    known = {rank: load.pace or paces.get(rank) for rank, load in recent.items()}
    values = [pace for pace in known.values() if pace]
    return WorldLoad(
        rate=samples / (sum(present) / len(present)) if present and samples else None,
        pace_sum=sum(values) if values and len(values) == len(recent) else None,
        best_pace=max(values, default=None),
    )
