"""The real driver: does a policy's effects on one rank, with real averages, for whoever takes the steps.

Decides nothing about the schedule; it measures, counts and records. One driver lives as long as its rank. The stepper
takes the steps of `train()`, a user's loop its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from outrider.average.facts import Settled
from outrider.core.effects import (
    Average,
    Batch,
    Begin,
    Collect,
    Confer,
    Effect,
    Expect,
    HandOver,
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
from outrider.data.parcel import parcel_of
from outrider.errors import OutriderError
from outrider.replica.loop_replica import LoopReplica
from outrider.replica.replica import Replica
from outrider.runtime.averages import Averages
from outrider.runtime.clock import DeviceClock, SharedClock
from outrider.runtime.throttle import Throttle
from outrider.runtime.window import AverageAccount, Window, as_report
from outrider.timeline.recorder import Recorder
from outrider.timeline.windows import WindowLog


@dataclass(frozen=True, slots=True)
class Lead:
    """One rank has worked alone, up to the world's sample `at`: the others stand where they were."""

    source: int
    at: int


class Driver:
    """All of a segment but its steps, one segment after the other, on this rank."""

    def __init__(
        self,
        *,
        replica: Replica | LoopReplica,
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
        self.clock: DeviceClock | None = None
        """Measures steps by events; not where a user's loop takes them."""
        self.shared_clock: SharedClock | None = None
        self.has_shared = False
        """Whether the last step on a device was a shared one."""
        if isinstance(replica, Replica) and replica.device.type == "cuda":
            self.clock = DeviceClock(replica.device)
            self.shared_clock = SharedClock(replica.device)
        if replica.rank == 0:
            recorder.event("transport", value=averages.transport)
        self.window_log = WindowLog(recorder, slept_s=lambda: throttle.slept_s)
        self.account = AverageAccount()
        self.windows = 0
        self.is_stopped = False
        self.samples = 0
        """Steps' samples on this rank, in this epoch."""
        self.reached = 0
        """The world's samples that averages have accounted for, in this epoch."""
        self.anchor: int | None = None
        self.drift: float | None = None
        self.lead: Lead | None = None
        """Who is ahead of the others, until they catch up; the same on all ranks."""
        self.schedule: ScheduleRecorder | None = None
        """Keeps the effects of a segment where they are asked for."""
        self.epoch_base = 0
        self._leases: Leases | None = None
        self._stepped_since_begin = False
        self._handlers: dict[type, Callable[[Any], Any]] = {
            Take: self._take,
            Expect: self._expect,
            Average: self._average,
            Begin: self._begin,
            Poll: self._poll,
            Collect: self._collect,
            Confer: self._confer,
            HandOver: self._hand_over,
            Merge: self._merge,
            Note: self._note,
        }

    def steps(
        self, policy: Policy, *, leases: Leases, epoch_base: int
    ) -> Generator[Step | SharedStep, Report | None, None]:
        """Do all of a segment but its steps: those are yielded for the caller to do, who sends back a report."""
        self._leases = leases
        self.epoch_base = epoch_base
        self.averages.step_ahead()
        result: Any = None
        while True:
            try:
                effect: Effect = policy.send(result)
            except StopIteration:
                self.window_log.end()
                self.averages.step_back()
                return
            if isinstance(effect, SharedStep | Merge):
                self.catch_up()
            result = (yield effect) if isinstance(effect, Step | SharedStep) else self._handlers[type(effect)](effect)
            if self.schedule is not None:
                self.schedule.saw(effect, result)

    # Data

    def _take(self, effect: Take) -> Lease | None:
        assert self._leases is not None
        with self._gap():
            return self._leases.take(effect)

    def _expect(self, effect: Expect) -> None:
        self.feed.announce(effect.batches)

    def fetch(self, batch: Batch, *, as_parcel: bool = False) -> Any:
        """The data of a batch, or a parcel for a captured step to unpack; waiting for it is recorded."""
        started_s = time.perf_counter()
        try:
            return parcel_of(self.feed, batch) if as_parcel else self.feed.fetch(batch)
        except OutriderError as error:
            error.rank, error.step = self.replica.rank, self.replica.steps
            raise
        finally:
            self.recorder.add_wait("data", time.perf_counter() - started_s)

    # Steps

    def computed(self, samples: int, seconds: float, *, is_steady: bool = True) -> None:
        """A gradient, or a whole local step, took this long; only steady ones tell a rank's pace."""
        self.window.stepped(samples=samples, seconds=seconds, is_steady=is_steady)
        self.window_log.stepped(samples=samples, seconds=seconds)

    def shared(self, samples: int, settled: Settled) -> Report:
        """A shared step ended; what the ranks told each other in it."""
        self.window_log.averaged(self.window.exposed_s)
        self.samples += samples
        self.on_step()
        return self._report(settled, is_blocking=True)

    def stepped(self, samples: int, seconds: float) -> None:
        """A local step ended."""
        self.computed(samples, seconds)
        self.samples += samples
        self._stepped_since_begin = True
        self.on_step()

    # Averages

    def _average(self, effect: Average) -> Report:
        self._wait_for_device()
        self._end_window()
        started_s = time.perf_counter()
        settled = self.averages.average(self._taken(effect.samples), self.facts())
        elapsed_s = time.perf_counter() - started_s
        self.window.exposed_s = elapsed_s
        if self.clock is not None:
            self.clock.restart()
        report = self._report(settled, is_blocking=True)
        self._record_average(report, elapsed_s)
        return report

    def _begin(self, effect: Begin) -> None:
        # Nobody stops here: events tell what the steps took, as far as they are done.
        if self.clock is None:
            self._wait_for_device()
        self._end_window()
        with self._gap():
            self.averages.begin(self._taken(effect.samples), self._facts(is_dry=effect.is_dry))
        self._stepped_since_begin = False

    def _poll(self, effect: Poll) -> Report | None:
        return self._take_in() if self.averages.is_ready() else None

    def _collect(self, effect: Collect) -> Report:
        started_s = time.perf_counter()
        report = self._take_in()
        self.recorder.wait("average", time.perf_counter() - started_s)
        return report

    def _take_in(self) -> Report:
        with self._gap():
            settled = self.averages.correct() if self._stepped_since_begin else self.averages.load()
        report = self._report(settled, is_blocking=False)
        self._record_average(report, (settled.total_ms or 0.0) / 1e3)
        return report

    def _confer(self, effect: Confer) -> Report:
        self._stop_working(effect.source)
        started_s = time.perf_counter()
        settled = self.averages.confer(effect.samples, self.facts())
        self._rest(effect.source, elapsed_s=time.perf_counter() - started_s)
        return self._report(settled, is_blocking=True, is_average=False)

    def _hand_over(self, effect: HandOver) -> Report:
        """Told now, done when somebody needs it: where the next segment goes on alone, that may be never."""
        self.lead = Lead(effect.source, at=self.epoch_base + effect.at)
        if self.lags:
            # While it has nothing else to do: the learning rate is told by every rank.
            assert isinstance(self.replica, Replica)
            self.replica.follow_schedule(self.lead.at)
        return self._confer(Confer(effect.source, effect.samples))

    @property
    def lags(self) -> bool:
        """Whether another rank has learned what this one has not."""
        return self.lead is not None and self.lead.source != self.replica.rank

    def catch_up(self, *, is_training: bool = True) -> float:
        """Every rank comes to where the one stands that worked alone, if one did; what that took, in s.

        All ranks call this. Where it `is_training`, it is charged as an average is.
        """
        if self.lead is None:
            return 0.0
        lead, self.lead = self.lead, None
        started_s = time.perf_counter()
        self.averages.hand_over(lead.source, at=lead.at)
        elapsed_s = time.perf_counter() - started_s
        self.recorder.event("hand over", source=lead.source, ms=round(elapsed_s * 1e3, 3))
        if is_training:
            self.window.exposed_s += elapsed_s
        self.restart_clocks()
        return elapsed_s

    def _stop_working(self, source: int) -> None:
        if self.replica.rank == source:
            self._wait_for_device()
            self._measure_window()
        else:
            self.window_log.end()

    def _rest(self, source: int, *, elapsed_s: float) -> None:
        """Up to a meeting all ranks but one had nothing to do."""
        rested_s = 0.0 if self.replica.rank == source else elapsed_s
        self.window.exposed_s = elapsed_s - rested_s
        self.account.wait_s += rested_s
        self.recorder.wait("rest", rested_s)
        self.has_shared = False
        self.restart_clocks()

    def _merge(self, effect: Merge) -> None:
        settled = self.averages.average(effect.samples, self._facts(is_dry=True))
        # None of the policy's averages, but it brings word of what the last of those cost.
        told = as_report(self.windows, settled.facts, settled.drift)
        self.account.charge(told, self.replica.rank, is_blocking=True)

    def _taken(self, planned: int) -> int:
        """Samples since the last average: fewer than the policy planned where a user left the loop early."""
        return min(planned, self.window.samples)

    def facts(self) -> list[float]:
        return self._facts(is_dry=False)

    def _facts(self, *, is_dry: bool) -> list[float]:
        return self.window.facts(is_dry=is_dry, wants_stop=self.stop_requested())

    def _report(self, settled: Settled, *, is_blocking: bool, is_average: bool = True) -> Report:
        report = as_report(self.windows, settled.facts, settled.drift)
        self.windows += 1
        # What was averaged, not what was told: a device tells of a shared step with the next one.
        self.reached += settled.total_samples
        self.drift = settled.drift
        self.is_stopped = self.is_stopped or report.wants_stop
        waited_before_s = self.account.wait_s
        self.account.averages += is_average
        self.account.charge(report, self.replica.rank, is_blocking=is_blocking)
        self._record_wait(report, self.account.wait_s - waited_before_s)
        return report

    def _record_wait(self, report: Report, waited_s: float) -> None:
        """How long the average before this one waited for others: known only now, from what all ranks reported."""
        self.recorder.add_wait("average", waited_s)
        # One event per window; shared steps are too many for that, the end of the epoch has their sum.
        if report.drift is not None and waited_s >= 1e-4:
            self.recorder.event("wait", cause="average", window=report.window - 1, ms=round(waited_s * 1e3, 3))

    def _record_average(self, report: Report, elapsed_s: float) -> None:
        ms = round(elapsed_s * 1e3, 3)
        self.recorder.event("average end", window=report.window, ms=ms, drift=report.drift)

    def _note(self, effect: Note) -> None:
        decision = effect.decision
        if decision.kind == "plan":
            self.anchor = decision.details["anchor"]
        # All ranks decide the same: one voice is enough.
        if self.replica.rank == 0:
            self.recorder.event(decision.kind, value=decision.value, reason=decision.reason, **decision.details)

    @contextlib.contextmanager
    def _gap(self) -> Iterator[None]:
        """What is no step, and takes time from the compute path."""
        if self.clock is not None:
            with self.clock.gap():
                yield
            return
        started_s = time.perf_counter()
        yield
        self.window.exposed_s += time.perf_counter() - started_s

    def restart_clocks(self) -> None:
        """What comes next follows on no step: time begins anew."""
        for clock in (self.clock, self.shared_clock):
            if clock is not None:
                clock.restart()

    def _wait_for_device(self) -> None:
        """Kernels run behind the host: the window's time ends when they do."""
        started_s = time.perf_counter()
        self.averages.wait_for_device()
        waited_s = time.perf_counter() - started_s
        self.window.compute_s += waited_s
        self.window_log.waited_for_device(waited_s)
        self.replica.check_loss()

    def _end_window(self) -> None:
        """What comes next is its average."""
        self._measure_window()
        self.recorder.event("average start", window=self.windows)

    def _measure_window(self) -> None:
        """The steps of a window are over."""
        if self.clock is not None:
            assert isinstance(self.replica, Replica)
            self.replica.watch_loss()
            measured = self.clock.measure(self.window.batches)
            self.window.compute_s = measured.compute_s
            self.window.exposed_s += measured.exposed_s
            self.window.setup_s += measured.setup_s
        self.window_log.end(self.windows)
