"""The other side of a policy: hands the batches it wants stepped to the user's loop, and answers for the user.

Decides what a batch, a break and a shared gradient mean where the user takes the steps. The order of effects is the
policy's, averages and their accounts are the driver's. Used by the session, one pass over a data set after the other.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import torch

from outrider.average.facts import Settled
from outrider.core.effects import Batch, Policy, Report, SharedStep, Step
from outrider.data.leases import Leases
from outrider.replica.loop_replica import LoopReplica, refuse_step
from outrider.runtime.driver import Driver
from outrider.runtime.window import NUM_FACTS

BORROWED = 2
"""Samples that a rank without any computes on, for nothing: it must take the same way through the user's code."""


class UserLoop:
    """One rank's part of the user's loop; `next_batch` until it gives None, or `leave` at any time."""

    def __init__(self, driver: Driver, replica: LoopReplica) -> None:
        self._driver = driver
        self._replica = replica
        self.is_leaving = False
        self.is_inside = False
        """Whether the user has a batch in hand."""
        self.samples = 0
        """Of the batch in hand; 0 for one that is borrowed."""
        self._steps: Generator[Step | SharedStep, Report | None, None] | None = None
        self._effect: Step | SharedStep | None = None
        self._started_s = 0.0
        self._paused_s = 0.0
        self._shared: Settled | None = None
        self._stepped: list[torch.optim.Optimizer] = []
        self._habit: list[torch.optim.Optimizer] = []
        """Which optimizers the user stepped with the last batch, in order."""
        replica.before_step = self._before_step

    @property
    def is_open(self) -> bool:
        return self._steps is not None

    def open(self, policy: Policy, *, leases: Leases, epoch_base: int, batch_size: int) -> None:
        """Begin a pass; all ranks do."""
        assert self._steps is None, "one pass at a time"
        self.is_leaving = False
        self._driver.is_stopped = False
        self._replica.tick_every(batch_size, since=epoch_base)
        self._steps = self._driver.steps(policy, leases=leases, epoch_base=epoch_base)

    def next_batch(self) -> Any | None:
        """Close the books on the last batch and fetch the next; None at the end of the pass."""
        effect = self._advance(self._finish() if self._effect is not None else None)
        return None if effect is None else self._hand_out(effect)

    def leave(self) -> None:
        """End the pass before its time: this rank computes no more, and the others end at their next average."""
        if self._steps is None:
            return
        self.is_leaving = True
        report = self._abandon() if self._effect is not None else None
        while (effect := self._advance(report)) is not None:
            report = self._answer_empty(effect) if isinstance(effect, SharedStep) else None

    def pause(self, seconds: float) -> None:
        """Time that the user's batch took for something else than training."""
        self._paused_s += seconds

    # From effect to effect

    def _advance(self, report: Report | None) -> Step | SharedStep | None:
        assert self._steps is not None
        try:
            return self._steps.send(report)
        except StopIteration:
            self._steps = None
            return None

    def _hand_out(self, effect: Step | SharedStep) -> Any:
        self._take_up(effect, samples=effect.batch.count)
        data = self._driver.fetch(effect.batch if self.samples else self._borrowed(effect))
        self.is_inside = True
        return data

    def _take_up(self, effect: Step | SharedStep, *, samples: int) -> None:
        self._effect = effect
        self.samples = samples
        self._replica.at = self._driver.epoch_base + effect.at
        self._shared, self._stepped = None, []
        self._started_s, self._paused_s = time.perf_counter(), 0.0
        self._driver.throttle.__enter__()

    def _borrowed(self, effect: Step | SharedStep) -> Batch:
        start = min(effect.at, self._driver.feed.num_samples - BORROWED)
        return Batch(max(0, start), min(BORROWED, self._driver.feed.num_samples))

    def _finish(self) -> Report | None:
        """The user asked for the next batch: this one is done."""
        effect = self._effect
        assert effect is not None
        self._habit = self._stepped
        if isinstance(effect, Step):
            self._driver.throttle.__exit__(None, None, None)
            self._driver.stepped(self.samples, self._lap_s())
            self._put_down()
            return None
        if self._shared is None:
            # Gradients that the user goes on to accumulate: their mean over ranks is as good a base as their own.
            self._share(self.samples)
        return self._conclude_shared()

    def _abandon(self) -> Report | None:
        """The user left in the middle of a batch."""
        if isinstance(self._effect, Step):
            self._driver.throttle.__exit__(None, None, None)
            self._driver.stepped(self.samples if self._stepped else 0, self._lap_s())
            self._put_down()
            return None
        missing = self._habit[len(self._stepped) :] if self._stepped or self._shared is None else []
        taken = self.samples if self._shared is not None else 0
        self.samples = 0
        self._step_empty(missing)
        self.samples = taken
        return self._conclude_shared()

    def _answer_empty(self, effect: SharedStep) -> Report:
        """Take part in a shared step without samples, as often as the others do."""
        self._take_up(effect, samples=0)
        self.is_inside = True
        self._step_empty(self._habit)
        return self._conclude_shared()

    def _step_empty(self, optimizers: list[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            self._replica.zero_gradients()
            optimizer.step()
        self._replica.zero_gradients()
        if self._shared is None:
            self._share(0)

    def _conclude_shared(self) -> Report:
        assert self._shared is not None
        self._driver.throttle.__exit__(None, None, None)
        self._driver.window.compute_s += self._lap_s()
        self._put_down()
        return self._driver.shared(self.samples, self._shared)

    def _put_down(self) -> None:
        self._effect, self.is_inside = None, False

    # What happens at the user's optimizer.step()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.is_inside:
            refuse_step(optimizer)
        self._replica.clip(optimizer)
        if isinstance(self._effect, SharedStep):
            self._share(self.samples)
        self._stepped.append(optimizer)

    def _share(self, samples: int) -> None:
        """Average the gradients of all ranks; only the first time in a batch carries what the policy learns from."""
        driver = self._driver
        driver.averages.wait_for_device()
        driver.throttle.__exit__(None, None, None)
        computed_s = self._lap_s()
        is_first = self._shared is None
        if is_first:
            driver.computed(samples, computed_s)
        driver.averages.average_gradients(samples, driver.facts() if is_first else [0.0] * NUM_FACTS)
        settled = driver.averages.gradient_facts()
        exposed_s = self._lap_s()
        if is_first:
            self._shared = settled
            driver.window.exposed_s = exposed_s
        else:
            driver.window.compute_s += computed_s
            driver.window.exposed_s += exposed_s
        driver.throttle.__enter__()

    def _lap_s(self) -> float:
        """Seconds since the last lap, without pauses."""
        now_s = time.perf_counter()
        lap_s = now_s - self._started_s - self._paused_s
        self._started_s, self._paused_s = now_s, 0.0
        return lap_s
