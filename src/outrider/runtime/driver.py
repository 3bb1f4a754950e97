"""The real driver: does a policy's effects on one rank, with real steps and real averages.

Decides nothing about the schedule; it measures, counts and records. One driver lives as long as its rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from outrider.core.effects import (
    Average,
    Batch,
    Begin,
    Collect,
    Effect,
    Expect,
    Lease,
    Merge,
    Note,
    Policy,
    Poll,
    Report,
    SharedStep,
    Step,
    Take,
)
from outrider.core.schedule import ScheduleRecorder
from outrider.data.feed import Feed
from outrider.data.leases import Leases
from outrider.errors import OutriderError
from outrider.replica.replica import Replica
from outrider.runtime.averages import Averages
from outrider.runtime.throttle import Throttle
from outrider.runtime.window import AverageAccount, Window, as_report
from outrider.timeline.recorder import Recorder


class Driver:
    """Runs one segment after the other on this rank."""

    def __init__(
        self,
        *,
        replica: Replica,
        feed: Feed,
        averages: Averages,
        throttle: Throttle,
        recorder: Recorder,
        stop_requested: Callable[[], bool],
        on_step: Callable[[], None],
    ) -> None:
        self.replica = replica
        self.feed = feed
        self.averages = averages
        self.throttle = throttle
        self.recorder = recorder
        self.stop_requested = stop_requested
        self.on_step = on_step
        self.window = Window()
        self.account = AverageAccount()
        self.windows = 0
        self.is_stopped = False
        self.samples = 0
        """Steps' samples on this rank, in this epoch."""
        self.reached = 0
        """The world's samples that averages have accounted for, in this epoch."""
        self.anchor: int | None = None
        self.drift: float | None = None
        self.schedule: ScheduleRecorder | None = None
        """Keeps the effects of a segment where they are asked for."""
        self._epoch_base = 0
        self._leases: Leases | None = None
        self._stepped_since_begin = False
        self._handlers: dict[type, Callable[[Any], Any]] = {
            Take: self._take,
            Expect: self._expect,
            Step: self._step,
            SharedStep: self._shared_step,
            Average: self._average,
            Begin: self._begin,
            Poll: self._poll,
            Collect: self._collect,
            Merge: self._merge,
            Note: self._note,
        }

    def run(self, policy: Policy, *, leases: Leases, epoch_base: int) -> None:
        """One segment of an epoch, to the end of the policy."""
        self._leases = leases
        self._epoch_base = epoch_base
        result: Any = None
        while True:
            try:
                effect: Effect = policy.send(result)
            except StopIteration:
                break
            result = self._handlers[type(effect)](effect)
            if self.schedule is not None:
                self.schedule.saw(effect, result)

    # Data

    def _take(self, effect: Take) -> Lease | None:
        assert self._leases is not None
        started_s = time.perf_counter()
        lease = self._leases.take(effect)
        self.window.exposed_s += time.perf_counter() - started_s
        return lease

    def _expect(self, effect: Expect) -> None:
        self.feed.announce(effect.batches)

    def _fetch(self, batch: Batch) -> Any:
        started_s = time.perf_counter()
        try:
            return self.feed.fetch(batch)
        except OutriderError as error:
            error.rank, error.step = self.replica.rank, self.replica.steps
            raise
        finally:
            self.recorder.add_wait("data", time.perf_counter() - started_s)

    # Steps

    def _step(self, effect: Step) -> None:
        started_s = time.perf_counter()
        with self.throttle:
            data = self._fetch(effect.batch)
            self.replica.step(data, samples=effect.batch.count, at=self._epoch_base + effect.at)
        self._stepped(effect.batch.count, time.perf_counter() - started_s)

    def _shared_step(self, effect: SharedStep) -> Report:
        samples = effect.batch.count
        started_s = time.perf_counter()
        with self.throttle:
            if samples:
                self.replica.gradient(self._fetch(effect.batch), samples=samples)
            else:
                self.replica.no_gradient()
            self.averages.wait_for_device()
        computed_s = time.perf_counter()
        self.window.stepped(samples=samples, seconds=computed_s - started_s)
        settled = self.averages.average_gradients(samples, self._facts(is_dry=False))
        averaged_s = time.perf_counter()
        with self.throttle:
            self.replica.update(at=self._epoch_base + effect.at)
        self.window.compute_s += time.perf_counter() - averaged_s
        self.window.exposed_s = averaged_s - computed_s
        self.samples += samples
        self.on_step()
        return self._report(settled.facts, None, is_blocking=True)

    def _stepped(self, samples: int, seconds: float) -> None:
        self.window.stepped(samples=samples, seconds=seconds)
        self.samples += samples
        self._stepped_since_begin = True
        self.on_step()

    # Averages

    def _average(self, effect: Average) -> Report:
        self._wait_for_device()
        started_s = time.perf_counter()
        settled = self.averages.average(effect.samples, self._facts(is_dry=False))
        elapsed_s = time.perf_counter() - started_s
        self.window.exposed_s = elapsed_s
        report = self._report(settled.facts, settled.drift, is_blocking=True)
        self._record_average(report, elapsed_s)
        return report

    def _begin(self, effect: Begin) -> None:
        self._wait_for_device()
        started_s = time.perf_counter()
        self.averages.begin(effect.samples, self._facts(is_dry=effect.is_dry))
        self._stepped_since_begin = False
        self.window.exposed_s += time.perf_counter() - started_s

    def _poll(self, effect: Poll) -> Report | None:
        return self._take_in() if self.averages.is_ready() else None

    def _collect(self, effect: Collect) -> Report:
        started_s = time.perf_counter()
        report = self._take_in()
        self.recorder.wait("average", time.perf_counter() - started_s)
        return report

    def _take_in(self) -> Report:
        started_s = time.perf_counter()
        settled = self.averages.correct() if self._stepped_since_begin else self.averages.load()
        elapsed_s = time.perf_counter() - started_s
        self.window.exposed_s += elapsed_s
        report = self._report(settled.facts, settled.drift, is_blocking=False)
        self._record_average(report, (settled.total_ms or 0.0) / 1e3)
        return report

    def _merge(self, effect: Merge) -> None:
        self.averages.average(effect.samples, self._facts(is_dry=True))

    def _facts(self, *, is_dry: bool) -> list[float]:
        return self.window.facts(is_dry=is_dry, wants_stop=self.stop_requested())

    def _report(self, rows: tuple[tuple[float, ...], ...], drift: float | None, *, is_blocking: bool) -> Report:
        report = as_report(self.windows, rows, drift)
        self.windows += 1
        self.reached += report.samples
        self.drift = drift
        self.is_stopped = self.is_stopped or report.wants_stop
        waited_before_s = self.account.wait_s
        self.account.saw(report, self.replica.rank, is_blocking=is_blocking)
        self._record_wait(report, self.account.wait_s - waited_before_s)
        return report

    def _record_wait(self, report: Report, waited_s: float) -> None:
        """How long the average before this one waited for others: known only now, from what all ranks reported."""
        self.recorder.add_wait("average", waited_s)
        # One event per window; shared steps are too many for that, the end of the epoch has their sum.
        if report.drift is not None and waited_s >= 1e-4:
            self.recorder.event("wait", cause="average", window=report.window - 1, ms=round(waited_s * 1e3, 3))

    def _record_average(self, report: Report, elapsed_s: float) -> None:
        mine = report.ranks[self.replica.rank]
        self.recorder.event(
            "average",
            window=report.window,
            ms=round(elapsed_s * 1e3, 3),
            samples=mine.samples,
            batches=mine.batches,
            compute_ms=round(mine.compute_ms, 3),
            drift=report.drift,
        )

    def _note(self, effect: Note) -> None:
        decision = effect.decision
        if decision.kind == "plan":
            self.anchor = decision.details["anchor"]
        # All ranks decide the same: one voice is enough.
        if self.replica.rank == 0:
            self.recorder.event(decision.kind, value=decision.value, reason=decision.reason, **decision.details)

    def _wait_for_device(self) -> None:
        """Kernels run behind the host: the window's time ends when they do."""
        started_s = time.perf_counter()
        self.averages.wait_for_device()
        self.window.compute_s += time.perf_counter() - started_s
        self.replica.check_loss()
