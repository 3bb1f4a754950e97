"""Takes the steps of `train()` on one rank: local ones, and those whose gradients all ranks share.

Decides when a step's time begins and ends, on a host and on a device; all else of a segment is the driver's.
Called by the rank, once per segment.
"""

from __future__ import annotations

import contextlib
import time

from outrider.core.effects import Batch, Policy, Report, SharedStep, Step
from outrider.data.leases import Leases
from outrider.replica.replica import Replica
from outrider.runtime.clock import SharedClock
from outrider.runtime.driver import Driver


class Stepper:
    """Runs one segment after the other on this rank."""

    def __init__(self, driver: Driver, replica: Replica) -> None:
        self._driver = driver
        self._replica = replica

    def run(self, policy: Policy, *, leases: Leases, epoch_base: int) -> None:
        """One segment of an epoch, to the end of the policy."""
        driver, replica = self._driver, self._replica
        steps = driver.steps(policy, leases=leases, epoch_base=epoch_base)
        report: Report | None = None
        driver.restart_clocks()
        if replica.captured is not None:
            replica.captured.wake()
        with contextlib.suppress(StopIteration):
            while True:
                report = self._take(steps.send(report))
        # A device may still be at the last steps.
        driver.averages.wait_for_device()
        replica.check_loss()
        if replica.captured is not None:
            replica.captured.sleep()

    def _take(self, effect: Step | SharedStep) -> Report | None:
        if isinstance(effect, Step):
            self._step(effect)
            return None
        clock = self._driver.shared_clock
        return self._shared_step(effect) if clock is None else self._shared_step_on_device(effect, clock)

    def _step(self, effect: Step) -> None:
        driver, replica = self._driver, self._replica
        if driver.has_shared and driver.clock is not None:
            # Shared steps have a clock of their own.
            driver.clock.restart()
            driver.has_shared = False
        started_s = time.perf_counter()
        warm_ups = replica.num_warm_ups
        with driver.throttle:
            data = driver.fetch(effect.batch, as_parcel=replica.captured is not None)
            replica.step(data, samples=effect.batch.count, at=driver.epoch_base + effect.at)
            if driver.clock is not None:
                driver.clock.stepped(is_steady=replica.num_warm_ups == warm_ups)
        driver.stepped(effect.batch.count, time.perf_counter() - started_s)

    def _shared_step(self, effect: SharedStep) -> Report:
        driver, replica = self._driver, self._replica
        samples = effect.batch.count
        started_s = time.perf_counter()
        with driver.throttle:
            self._gradient(effect.batch)
        computed_s = time.perf_counter()
        driver.computed(samples, computed_s - started_s)
        driver.averages.average_gradients(samples, driver.facts())
        settled = driver.averages.gradient_facts()
        averaged_s = time.perf_counter()
        with driver.throttle:
            replica.update(at=driver.epoch_base + effect.at)
        replica.watch_loss()
        driver.window.compute_s += time.perf_counter() - averaged_s
        driver.window.exposed_s = averaged_s - computed_s
        return driver.shared(samples, settled)

    def _shared_step_on_device(self, effect: SharedStep, clock: SharedClock) -> Report:
        """The whole step is queued before anybody waits for it, so what it took is told with the next one."""
        driver, replica = self._driver, self._replica
        samples = effect.batch.count
        warm_ups = replica.num_warm_ups
        clock.mark()
        self._gradient(effect.batch)
        clock.mark()
        driver.averages.average_gradients(samples, driver.facts())
        clock.mark()
        replica.update(at=driver.epoch_base + effect.at)
        clock.mark()
        settled = driver.averages.gradient_facts()
        measured = clock.measured()
        replica.watch_loss()
        # The first step warms the device up, and so does the first of a new shape.
        is_steady = driver.has_shared and replica.num_warm_ups == warm_ups
        driver.computed(samples, measured.compute_s, is_steady=is_steady)
        driver.has_shared = True
        driver.window.exposed_s = measured.exposed_s
        return driver.shared(samples, settled)

    def _gradient(self, batch: Batch) -> None:
        if not batch.count:
            self._replica.no_gradient()
            return
        data = self._driver.fetch(batch, as_parcel=self._replica.captured is not None)
        with self._driver.averages.overlapped(batch.count):
            self._replica.gradient(data, samples=batch.count)
