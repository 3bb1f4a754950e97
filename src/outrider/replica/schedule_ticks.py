"""The progress of a prepared schedule: in optimizer steps, batches or epochs, as one device would count them.

Decides how many samples of the world a tick has. All counts are functions of those samples, so that a curve is the same
for any world size. Knows no optimizer: the replica of a user's loop reports batches and steps.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from outrider.errors import ConfigError

TickPer = Literal["optimizer-step", "sample-batch", "epoch"]


class SampleCount:
    """Counts units of a number of samples of the world; the size of a unit may change on the way."""

    def __init__(self) -> None:
        self.unit = 1
        self._before = self._since = 0

    def change(self, unit: int, *, since: int) -> None:
        """Count units of this size, from this number of samples on."""
        if unit != self.unit:
            self._before += (since - self._since) // self.unit
            self._since, self.unit = since, unit

    def correct(self, unit: int) -> None:
        """Correct the size of units since the last change, which was unknown until now."""
        self.unit = unit

    def at(self, samples: int) -> int:
        return self._before + (samples - self._since) // self.unit

    def samples_to(self, count: int, samples: int, *, unit: int) -> int:
        """The samples from `samples` until `count` is reached, for units of this size from now on."""
        begun = (samples - self._since) % self.unit if unit == self.unit else 0
        return (count - self.at(samples)) * unit - begun

    def state(self) -> list[int]:
        return [self._before, self._since, self.unit]

    def restore(self, state: list[int]) -> None:
        self._before, self._since, self.unit = state


class BatchesPerStep:
    """How many batches a user's loop takes per optimizer step, as observed so far."""

    def __init__(self) -> None:
        self.seen: int | None = None
        """The number of batches per step; None before the first step."""
        self._since_step = 0
        self._since_step_in_pass = 0
        self._candidate: int | None = None

    @property
    def at_least(self) -> int:
        """The number of batches per step; before the first step a lower bound."""
        return self.seen or max(1, self._since_step)

    def open_pass(self) -> None:
        self._since_step_in_pass = 0

    def since_step(self) -> list[int | None]:
        """Batches since the last step, in all and in this pass, and a number that may become the new one."""
        return [self._since_step, self._since_step_in_pass, self._candidate]

    def continue_from(self, since_step: list[Any]) -> None:
        """Continue the count of another rank."""
        self._since_step, self._since_step_in_pass, self._candidate = since_step

    def saw_batch(self) -> None:
        self._since_step += 1
        self._since_step_in_pass += 1

    def saw_step(self) -> bool:
        """Count a step; returns whether the number of batches per step has changed.

        The first step of a pass may or may not include batches of the previous pass: loops that count batches anew in
        each pass drop those. A single step with fewer batches is the last of a pass; two of them are a new habit.
        """
        numbers = {self._since_step, self._since_step_in_pass} - {0}
        own = self._since_step_in_pass or self._since_step
        self._since_step = self._since_step_in_pass = 0
        if not own or self.seen in numbers:
            self._candidate = None
            return False
        if self.seen is not None and self._candidate not in numbers:
            self._candidate = own
            return False
        self.seen = own if self.seen is None else self._candidate
        self._candidate = None
        return True


class ScheduleTicks:
    """The place of prepared schedules, `per` optimizer step, batch or epoch."""

    def __init__(self, per: TickPer = "optimizer-step") -> None:
        if per not in get_args(TickPer):
            raise ConfigError(f"per must be one of {', '.join(get_args(TickPer))}, got {per!r}", hint="leave per out")
        self.per = per
        self.batches = SampleCount()
        """Counts batches of one device."""
        self.steps = SampleCount()
        """Counts steps of its optimizer: fewer than batches if the user accumulates gradients."""
        self.per_step = BatchesPerStep()
        self.epoch = 0

    def open_pass(self, batch_size: int, *, since: int) -> None:
        """Use this batch size from this number of samples of the world on."""
        self.batches.change(batch_size, since=since)
        self.steps.change(batch_size * self.per_step.at_least, since=since)

    def saw_batch(self) -> None:
        self.per_step.saw_batch()
        if self.per_step.seen is None:
            self.steps.correct(self.batches.unit * self.per_step.at_least)

    def saw_step(self, samples: int) -> None:
        """Count a step of the first optimizer, begun or skipped at this number of samples of the world."""
        is_first = self.per_step.seen is None
        if self.per_step.saw_step():
            unit = self.batches.unit * self.per_step.at_least
            if is_first:
                self.steps.correct(unit)
            else:
                self.steps.change(unit, since=samples)

    def due(self, samples: int) -> int:
        """Ticks of the schedules after this number of samples of the world."""
        if self.per == "epoch":
            return self.epoch
        return (self.steps if self.per == "optimizer-step" else self.batches).at(samples)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps.state(), "per_step": self.per_step.seen, "epoch": self.epoch}

    def restore(self, state: dict[str, Any]) -> None:
        self.steps.restore(state["steps"])
        self.per_step.seen, self.epoch = state["per_step"], state["epoch"]
