"""Executes the steps of `train()` on one rank: local steps, and shared steps whose gradients all ranks average.

Decides when the time of a step starts and ends, by the host's clock or by events on a device. The driver does the rest
of a segment.
Called by `TrainRun` once per segment.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from functools import partial

from outrider import faults
from outrider.average.rank_facts import Settled
from outrider.policy.effects import AverageReport, Batch, SharedStep, Step
from outrider.rank.driver import Driver, Segment
from outrider.replica.replica import Replica


class Stepper:
    """Runs segments on this rank, one after another."""

    def __init__(self, driver: Driver, replica: Replica, *, scaled_ranks: Collection[int] = ()) -> None:
        """`scaled_ranks` use loss scaling: if one of their gradients overflows, all ranks skip the shared step."""
        self._scaled_ranks = frozenset(scaled_ranks)
        self._driver = driver
        self._meter = driver.meter
        self._replica = replica

    def run(self, segment: Segment) -> None:
        """Run one segment of an epoch until its policy ends."""
        replica = self._replica
        steps = self._driver.steps(segment)
        report: AverageReport | None = None
        if self._driver.open_window is None:
            self._meter.restart_clocks()
        else:
            self._meter.skip_pause()
        if replica.captured is not None:
            replica.captured.wake()
        with contextlib.suppress(StopIteration):
            while True:
                report = self._take(steps.send(report))
        # A device may still be executing the last steps.
        self._driver.averages.wait_for_device()
        replica.check_loss()
        replica.check_finite()
        if replica.captured is not None:
            replica.captured.sleep()

    def _take(self, effect: Step | SharedStep) -> AverageReport | None:
        if isinstance(effect, Step):
            self._step(effect)
            return None
        return self._shared_step_on_device(effect) if self._meter.is_on_device else self._shared_step(effect)

    def _step(self, effect: Step) -> None:
        driver, meter, replica = self._driver, self._meter, self._replica
        batch, is_on_device = effect.batch, meter.is_on_device
        if is_on_device:
            meter.begin_queued_step()
        started_s = time.perf_counter()
        warm_ups = replica.num_warm_ups
        with meter.compute:
            data = driver.fetch(batch, as_packed_batch=replica.captured is not None)
            faults.reach("compute")
            replica.step(data, samples=batch.count, at=driver.seen + effect.at)
            if is_on_device:
                meter.queued_step(is_steady=replica.num_warm_ups == warm_ups)
        driver.ended_step(batch.count, time.perf_counter() - started_s)

    def _shared_step(self, effect: SharedStep) -> AverageReport:
        driver, meter, replica = self._driver, self._meter, self._replica
        samples = effect.batch.count
        started_s = time.perf_counter()
        with meter.compute:
            faults.reach("compute")
            self._gradient(effect.batch)
        computed_s = time.perf_counter()
        meter.took_gradient(samples, computed_s - started_s)
        driver.join_shared_average()
        driver.averages.average_gradients(samples, driver.facts())
        settled = driver.averages.gradient_facts()
        is_skipped = self._is_skipped(settled, step=replica.steps)
        averaged_s = time.perf_counter()
        driver.activity.enter("compute")
        with meter.compute:
            self._end(effect, is_skipped=is_skipped)
        replica.watch_loss()
        meter.took_update(time.perf_counter() - averaged_s)
        meter.set_exposed(averaged_s - computed_s)
        return driver.ended_shared_step(samples, settled)

    def _shared_step_on_device(self, effect: SharedStep) -> AverageReport:
        """Queue the whole step before waiting for it, so its time is reported with the next step."""
        driver, meter, replica = self._driver, self._meter, self._replica
        samples = effect.batch.count
        warm_ups, step = replica.num_warm_ups, replica.steps
        meter.mark()
        faults.reach("compute")
        self._gradient(effect.batch)
        meter.mark()
        driver.join_shared_average()
        # Everything is queued from here on; the time of the average is known at the end.
        driver.activity.enter("compute")
        driver.averages.average_gradients(samples, driver.facts())
        # With loss scaling, read the facts first: they tell whether the step counts.
        waits = bool(self._scaled_ranks)
        if not waits:
            driver.averages.drop_bad_gradients()
        meter.mark()
        is_skipped = waits and self._is_skipped(driver.averages.gradient_facts(), step=step)
        self._end(effect, is_skipped=is_skipped)
        meter.mark()
        settled = driver.averages.gradient_facts()
        if not waits:
            driver.averages.refuse_not_finite(settled, step=step)
        # The first step of a new shape includes warm-up.
        meter.ended_queued_shared_step(samples, is_steady=replica.num_warm_ups == warm_ups)
        replica.watch_loss()
        return driver.ended_shared_step(samples, settled)

    def _is_skipped(self, settled: Settled, *, step: int) -> bool:
        """Whether a gradient overflowed on any rank; the same on all ranks."""
        self._driver.averages.refuse_not_finite(settled, step=step, scaled=self._scaled_ranks)
        scale = self._replica.loss_scale
        # A world of one rank has no facts about gradients.
        return bool(settled.not_finite) or (scale is not None and len(settled.facts) == 1 and scale.has_overflow)

    def _end(self, effect: SharedStep, *, is_skipped: bool) -> None:
        if is_skipped:
            self._replica.skip_update(at=self._driver.seen + effect.at)
        else:
            self._update(effect)

    def _update(self, effect: SharedStep) -> None:
        self._replica.update(at=self._driver.seen + effect.at)
        if not self._driver.averages.watches_gradients:
            self._replica.watch_update()

    def _gradient(self, batch: Batch) -> None:
        if not batch.count:
            self._replica.no_gradient()
            return
        data = self._driver.fetch(batch, as_packed_batch=self._replica.captured is not None)
        averages = self._driver.averages
        overlapped = partial(averages.overlapped, batch.count) if averages.can_overlap else None
        self._replica.gradient(data, samples=batch.count, overlapped=overlapped)
