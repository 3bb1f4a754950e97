"""The length and progress of a user's loop over epochs: in epochs, steps or samples of the whole world.

Decides how much of a data set a pass may still use. Knows no data: the session reports what was used.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.replica.loop_replica import LoopReplica
from outrider.replica.recipe import check_at_least, refuse_two_lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """When a loop ends: exactly one of epochs, steps and samples is given."""

    epochs: int | None = None
    steps: int | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in Goal.__slots__ if getattr(self, name) is not None}
        if not given:
            raise ConfigError(
                "epochs() was not told how long to train", hint="pass s.epochs(3) or s.epochs(steps=1000)"
            )
        if len(given) > 1:
            refuse_two_lengths(list(given))
        for name, value in given.items():
            check_at_least(name, value, 0 if name == "epochs" else 1)

    def is_reached(self, *, epochs: int, samples: int, replica: LoopReplica | None) -> bool:
        """Whether this number of epochs or samples reaches the goal."""
        if self.epochs is not None:
            return epochs >= self.epochs
        return replica is not None and self.left(samples, batch_size=replica.counts.batches.unit, replica=replica) == 0

    def refuse_standstill(self, epochs: int, *, samples: int) -> None:
        """Raise if an epoch took no samples: the loop would never reach its number of steps or samples."""
        if epochs > 0 and self.epochs is None and samples == 0:
            raise ConfigError(
                "an epoch took no samples, so the loop over epochs would never end",
                hint="loop over s.batches(...) in every epoch, or pass a number of epochs",
            )

    def left(self, samples: int, *, batch_size: int, replica: LoopReplica) -> int | None:
        """Samples that passes with this batch size may still use after `samples`; None: no limit."""
        if self.samples is not None:
            return max(0, self.samples - samples)
        if self.steps is not None:
            return max(0, replica.counts.batches.samples_to(self.steps, samples, unit=batch_size))
        return None


def progress(goal: Goal | None, *, epochs: float, samples: int, replica: LoopReplica | None) -> float:
    """The finished part of the loop, from 0 to 1; `epochs` includes the finished part of the current epoch."""
    if goal is None:
        raise ConfigError(
            "progress was asked for outside of a loop over epochs()",
            hint="loop over s.epochs(3) or s.epochs(steps=1000)",
        )
    if goal.epochs is not None:
        return min(1.0, epochs / goal.epochs) if goal.epochs else 1.0
    if goal.samples is not None:
        return min(1.0, samples / goal.samples)
    assert goal.steps is not None
    return 0.0 if replica is None else min(1.0, replica.counts.batches.at(samples) / goal.steps)


def samples_after(goal: Goal | None, *, left: int | None, epochs_done: int, pass_samples: int) -> int | None:
    """Samples of the loop after a pass, given `left` samples before it; None if the length of the loop is unknown."""
    if left is not None:
        return left - pass_samples
    if goal is None or goal.epochs is None:
        return None
    # Further passes are assumed to be as long as this one.
    return max(0, goal.epochs - epochs_done - 1) * pass_samples
