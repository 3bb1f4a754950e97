"""Executes the effects of a policy on one rank: leases, averages, hand-overs. It yields steps to a step source.

Decides nothing about the schedule and leaves measurements to the meter. One driver lives as long as its rank. The
stepper executes the steps of `train()`, the user's loop those of a session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider import faults
from outrider.average.rank_facts import Settled
from outrider.data.feed import Feed
from outrider.data.leases import Leases
from outrider.data.packed_batch import packed_batch_of
from outrider.errors import OutriderError
from outrider.policy.effects import (
    Average,
    AverageReport,
    AwaitOthers,
    Batch,
    Begin,
    Border,
    Collect,
    Confer,
    Decision,
    Effect,
    EndSegment,
    Expect,
    GiveBack,
    HandOver,
    Lease,
    LeaveOpen,
    Merge,
    Note,
    OpenWindow,
    Policy,
    Poll,
    Rest,
    SharedStep,
    Step,
    Take,
)
from outrider.policy.position_ranges import without
from outrider.policy.schedule import ScheduleRecorder
from outrider.rank.averages import Averages
from outrider.rank.host_threads import HostThreads
from outrider.rank.meter import Meter
from outrider.rank.segment_border import SegmentBorder
from outrider.rank.window import as_report
from outrider.replica.model_digest import digest_of
from outrider.replica.rank_replica import RankReplica
from outrider.timeline.recorder import Recorder

_STEPS = (Step, SharedStep)
_STARTS = (SharedStep, Merge, Take, Begin)
StepEffects = Generator[Step | SharedStep, AverageReport | None, None]


@dataclass(frozen=True, slots=True)
class Lead:
    """One rank has newer state, up to sample `at` of the world; the other ranks still have their old state."""

    source: int
    at: int
    with_loop: bool
    """Whether what a user's loop sets on `source` counts too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The part of an epoch between two checkpoints, from the view of one rank."""

    policy: Policy
    span: Lease
    """Positions in the order of the epoch."""
    leases: Leases
    feed: Feed
    seen: int
    """Samples of the whole world before this epoch or pass."""
    batch_size: int
    schedule: ScheduleRecorder | None = None
    """Records the effects, if requested."""


class Driver:
    """Runs segments on this rank, one after another; the caller executes their steps."""

    def __init__(
        self,
        *,
        replica: RankReplica,
        averages: Averages,
        meter: Meter,
        recorder: Recorder,
        border: SegmentBorder | None = None,
        threads: HostThreads | None = None,
        may_lag: bool = True,
        stop_requested: Callable[[], bool] = lambda: False,
        pause_due: Callable[[], bool] = lambda: False,
        on_step: Callable[[], None] = lambda: None,
        on_choice: Callable[[Decision], None] = lambda decision: None,
        on_report: Callable[[str, AverageReport], None] = lambda kind, report: None,
    ) -> None:
        """`may_lag`: whether ranks may keep old parameters after another one trained alone, until they are needed.

        Not in a user's loop, whose code may read the model at any time.
        """
        self.averages = averages
        self.meter = meter
        self._replica = replica
        self._recorder = recorder
        self.activity = recorder.activity
        """What this rank is doing, for the live page."""
        self._border = border
        self.threads = HostThreads() if threads is None else threads
        self._may_lag = may_lag
        self._stop_requested = stop_requested
        self._pause_due = pause_due
        self._on_step = on_step
        self._on_choice = on_choice
        self._on_report = on_report
        self._segment: Segment | None = None
        self._windows = 0
        self._reached = self._reached_before = 0
        self._open_window: OpenWindow | None = None
        self._is_stopped = self._is_paused = self._is_cut = False
        self._anchor: int | None = None
        self._drift: float | None = None
        self._lead: Lead | None = None
        self.num_rests = 0
        """How often ranks took over the state of one that trained alone, with what a user's loop sets there."""
        self._led_by: int | None = None
        """The rank that trained alone since the last layout, if ranks catch up at once."""
        self._has_leased = False
        self._stepped_since_begin = self._is_laid_out = False
        self._handlers = self._all_handlers()
        if replica.rank == 0:
            recorder.event("transport", value=averages.transport, bytes=averages.sizes.bytes)

    def _all_handlers(self) -> dict[type, Callable[[Any], Any]]:
        """The method for each effect but steps, which the caller executes."""
        return {
            Take: self._take,
            GiveBack: self._give_back,
            Expect: self._expect,
            Average: self._average,
            Begin: self._begin,
            Poll: self._poll,
            Collect: self._collect,
            Rest: self._rest,
            Confer: self._confer,
            HandOver: self._hand_over,
            Merge: self._merge,
            EndSegment: self._end_segment,
            AwaitOthers: self._await_others,
            LeaveOpen: self._leave_open,
            Note: self._note,
        }

    # Read by other modules

    @property
    def windows(self) -> int:
        """Averages since the start of the run."""
        return self._windows

    @property
    def reached(self) -> int:
        """Samples of this epoch, from all ranks, that averages have accounted for."""
        return max(0, self._reached)

    @property
    def is_stopped(self) -> bool:
        """Whether the last segment ended because a rank wanted to stop."""
        return self._is_stopped

    @property
    def is_paused(self) -> bool:
        """Whether the last segment ended early for a checkpoint; the rest of it comes next."""
        return self._is_paused

    @property
    def is_cut(self) -> bool:
        """Whether the policy ended the last segment early; the rest of it comes next, without a checkpoint."""
        return self._is_cut

    @property
    def ends_early(self) -> bool:
        """Whether the last segment ended before its last position, for a stop or a checkpoint."""
        return self._is_stopped or self._is_paused

    @property
    def open_window(self) -> OpenWindow | None:
        """The window with which the next segment begins; None if the last segment ended with an average."""
        return self._open_window

    @property
    def anchor(self) -> int | None:
        return self._anchor

    @property
    def drift(self) -> float | None:
        return self._drift

    @property
    def lead(self) -> Lead | None:
        """The rank that is ahead of the others, until they catch up; the same on all ranks."""
        return self._lead

    @property
    def lags(self) -> bool:
        """Whether another rank trained ahead of this one."""
        return self._lead is not None and self._lead.source != self._replica.rank

    @property
    def seen(self) -> int:
        """Samples of the whole world before the current epoch."""
        return self._current.seen

    @property
    def num_samples(self) -> int:
        return self._current.feed.num_samples

    @property
    def _current(self) -> Segment:
        assert self._segment is not None, "no segment was begun"
        return self._segment

    # Epochs and segments

    def go_on(self, windows: int) -> None:
        """Continue the count of windows from a checkpoint."""
        self._windows = windows

    def open_epoch(self) -> None:
        # If windows stayed open, the next averages also account for samples of the previous epoch.
        self._reached = 0 if self._open_window is None else -self._open_window.unaccounted
        self.meter.open_epoch()

    def steps(self, segment: Segment) -> StepEffects:
        """Run a segment; yields its steps for the caller to execute, and receives a report for each."""
        self._segment = segment
        # After an open window a rank may come to the end of the segment without a lease of its own.
        self._has_leased = self._has_leased and self._open_window is not None
        window, self._open_window = self._open_window, None
        self._reached_before = self._reached + (0 if window is None else window.unaccounted)
        is_within_pass = self._is_cut or self._is_paused
        self._is_stopped = self._is_paused = self._is_cut = False
        activity = self.activity
        # Time between two effects belongs to the second one: to a step, or to joining an average.
        activity.enter("join")
        if window is None:
            self._lay_out(is_within_pass)
            self.averages.move_to_lookahead()
        policy = faults.watched(segment.policy, self._replica)
        result: Any = None
        is_faulty = policy is not segment.policy
        # Entering a phase costs more than reading the clock, and most steps are followed by another one.
        stepped_s: float | None = None
        while True:
            try:
                effect: Effect = policy.send(result)
            except StopIteration:
                if stepped_s is not None:
                    activity.enter("join", at_s=stepped_s)
                # Nothing was cut if a layout change came with the last average.
                self._is_cut = self._is_cut and any(lease.count for lease in self.left_of_segment())
                self.meter.end_log()
                if self._open_window is None:
                    self.averages.move_to_average()
                    self.averages.ended()
                if segment.schedule is not None:
                    self._record_end(segment.schedule)
                activity.enter("epoch boundary")
                return
            if stepped_s is not None and not isinstance(effect, Step):
                activity.enter("join", at_s=stepped_s)
                stepped_s = None
            # From here on all ranks step. Each asks for its first lease or, where nothing is planned for it, begins its
            # first average at the same place, so all reach this collective.
            if isinstance(effect, _STARTS):
                self.catch_up()
            if isinstance(effect, _STEPS):
                if segment.schedule is not None:
                    # Recorded before the step, so that a replay also includes the step at which a run failed.
                    segment.schedule.saw(effect, None)
                if stepped_s is None:
                    activity.belonged_to("compute")
                result = yield effect
                if is_faulty:
                    # A fault may delay the next effect, which then shows what this rank does meanwhile.
                    activity.enter("join")
                else:
                    stepped_s = time.perf_counter()
            else:
                result = self._handle(effect, segment.schedule)

    def _handle(self, effect: Effect, schedule: ScheduleRecorder | None) -> Any:
        """Do what the policy asks for besides steps, and record it."""
        try:
            result = self._handlers[type(effect)](effect)
        except OutriderError:
            if schedule is not None:
                schedule.failed(effect)
            raise
        if schedule is not None:
            schedule.saw(effect, result)
        return result

    def _record_end(self, schedule: ScheduleRecorder) -> None:
        """Record what a replay continues from, and the digest that it compares its model with."""
        left = self.left_of_segment() if self.ends_early or self._is_cut else ()
        is_own = self.lags or self._open_window is not None
        schedule.ended(left, None if is_own else digest_of(self._replica.model))

    def _lay_out(self, is_within_pass: bool) -> None:
        """Apply what was frozen, thawed or seen to change since the last segment; all ranks call this."""
        agreed = self.averages.lay_out(catch_up=self._catch_up_with, is_within_pass=is_within_pass)
        if (agreed.is_new or not self._is_laid_out) and self._replica.rank == 0:
            self._recorder.event("layout", **asdict(self.averages.sizes), **agreed.told)
        self._is_laid_out = True
        self._led_by = None

    def settle(self, *, is_within_pass: bool) -> None:
        """After one rank trained alone, also take over what it froze, thawed or changed at rest; all ranks call this.

        Before code that follows a pass, or a checkpoint, sees the model.
        """
        if self._led_by is not None:
            self._lay_out(is_within_pass)

    def _catch_up_with(self) -> int | None:
        """Catch up; returns the rank that trained alone, if any."""
        source = self._led_by if self._lead is None else self._lead.source
        self.catch_up()
        return source

    # Data

    def _take(self, effect: Take) -> Lease | None:
        self._has_leased = True
        with self.meter.gap():
            return self._current.leases.take(effect)

    def _give_back(self, effect: GiveBack) -> None:
        self._current.leases.give_back(effect.lease)

    def left_of_segment(self) -> tuple[Lease, ...]:
        """The positions of the last segment that no average has accounted for; the same on all ranks."""
        if self._open_window is not None:
            return ()
        if self._has_leased:
            return self._current.leases.left()
        span, done = self._current.span, self._reached - self._reached_before
        return (Lease(span.start + done, span.count - done),)

    def left_in_segment(self, own: Sequence[Lease], *, is_alone: bool) -> tuple[Lease, ...] | None:
        """The positions that this rank's model has not yet learned from; None if only an average can tell.

        `own` holds this rank's positions in the segment. Other ranks may have trained on leases not averaged yet.
        """
        if self._has_leased and not is_alone:
            return None
        span, done = self._current.span, 0 if self._has_leased else self._reached - self._reached_before
        return without(span, [Lease(span.start, done), *own])

    @property
    def span(self) -> Lease:
        """The positions of the segment."""
        return self._current.span

    def _end_segment(self, effect: EndSegment) -> tuple[Lease, ...]:
        self._is_cut = not self.ends_early
        return self.left_of_segment()

    def _await_others(self, effect: AwaitOthers) -> Border | None:
        assert self._border is not None, "only ranks of a group wait for others"
        # The last steps that are still queued are no wait for others.
        self._wait_for_device()
        started_s = time.perf_counter()
        with self.activity.during("epoch boundary"):
            border = self._border.wait(
                is_ready=self.averages.is_ready, windows=self._windows, wants_end=self._wants_end
            )
        self.meter.waited_for_others(time.perf_counter() - started_s)
        return border

    def _wants_end(self) -> bool:
        # Where windows stay open nothing is laid out, so this is the place to look at all tensors.
        return self._stop_requested() or self._pause_due() or self.averages.wants_layout(is_thorough=True)

    def _leave_open(self, effect: LeaveOpen) -> None:
        # The epoch's time and losses are complete only when its steps are.
        self._wait_for_device()
        self._open_window = effect.window

    def _expect(self, effect: Expect) -> None:
        self._current.feed.announce(effect.batches)

    def fetch(self, batch: Batch, *, as_packed_batch: bool = False) -> Any:
        """The data of a batch, or a packed batch for a captured step to unpack; records the wait."""
        feed, activity = self._current.feed, self.activity
        before = activity.phase
        started_s = activity.enter("data")
        try:
            faults.reach("data")
            return packed_batch_of(feed, batch) if as_packed_batch else feed.fetch(batch)
        except OutriderError as error:
            error.rank, error.step = self._replica.rank, self._replica.steps
            raise
        finally:
            self._recorder.add_wait("data", activity.enter(before) - started_s)

    # Steps

    def ended_step(self, samples: int, seconds: float) -> None:
        """Account for a local step that ended."""
        self.meter.ended_step(samples, seconds)
        self.averages.stepped()
        self._stepped_since_begin = True
        self._on_step()

    def ended_shared_step(self, samples: int, settled: Settled) -> AverageReport:
        """Account for a shared step that ended; returns the report that the ranks exchanged in it."""
        self.meter.ended_shared_step(samples)
        self.averages.stepped()
        self._on_step()
        return self._report(settled, kind="shared", is_blocking=True)

    # Averages

    def join_shared_average(self) -> None:
        """Tell that this rank has its gradient and is about to average it with the others."""
        self.activity.enter("join")
        faults.reach("average")
        self.activity.enter("average")

    def _average(self, effect: Average) -> AverageReport:
        self._wait_for_device()
        self._end_window()
        started_s = time.perf_counter()
        with self.activity.during("average"):
            settled = self.averages.average(self._taken(effect.samples), self.facts())
        elapsed_s = time.perf_counter() - started_s
        self.meter.took_average(elapsed_s)
        report = self._report(settled, kind="average", is_blocking=True)
        self._record_average(report, elapsed_s)
        return report

    def _begin(self, effect: Begin) -> None:
        # No wait if events on the device measure the steps: they time the steps that are done.
        if not self.meter.is_on_device:
            self._wait_for_device()
        self._end_window()
        with self.meter.gap(), self.activity.during("average"):
            self.averages.begin(self._taken(effect.samples), self.facts(is_dry=effect.is_dry))
        self.meter.began()
        self._stepped_since_begin = False

    def _poll(self, effect: Poll) -> AverageReport | None:
        return self._take_in() if self.averages.is_ready() else None

    def _collect(self, effect: Collect) -> AverageReport:
        started_s = time.perf_counter()
        report = self._take_in()
        waited_s = time.perf_counter() - started_s
        self._recorder.wait("average", waited_s)
        self.activity.waited(waited_s)
        return report

    def _take_in(self) -> AverageReport:
        with self.meter.gap(), self.activity.during("average"):
            settled = self.averages.correct() if self._stepped_since_begin else self.averages.load()
        average_ms = settled.total_ms or 0.0
        self.meter.took_in(waited_ms=settled.waited_ms or 0.0, average_ms=average_ms, busy_ms=settled.busy_ms or 0.0)
        report = self._report(settled, kind="background", is_blocking=False)
        self._record_average(report, average_ms / 1e3)
        return report

    def _rest(self, effect: Rest) -> None:
        if self._replica.rank == effect.source:
            self.threads.work_alone()

    def _confer(self, effect: Confer) -> AverageReport:
        is_source = self._replica.rank == effect.source
        if is_source:
            self._wait_for_device()
            self._measure_window()
            self.threads.work_beside_others()
        else:
            self.meter.end_log()
        started_s = time.perf_counter()
        with self.activity.during("average" if is_source else "rest"):
            settled = self.averages.confer(self._taken(effect.samples), self.facts())
        elapsed_s = time.perf_counter() - started_s
        # All ranks but the source had nothing to do until this meeting.
        self.meter.rested(0.0 if is_source else elapsed_s, elapsed_s=elapsed_s)
        return self._report(settled, kind="confer", is_blocking=True, is_average=False)

    def _hand_over(self, effect: HandOver) -> AverageReport:
        """Announce that `source` has newer state; with `may_wait` only `catch_up()` copies it, if ever."""
        report = self._confer(Confer(effect.source, effect.samples))
        at = self.seen + min(effect.at, self._last_position)
        self._lead = Lead(effect.source, at=at, with_loop=effect.with_loop)
        if not (effect.may_wait and self._may_lag):
            self.catch_up()
        elif self.lags:
            # This rank has nothing else to do now, and every rank reports its learning rate.
            self._replica.follow_schedule(self._lead.at)
        return report

    @property
    def _last_position(self) -> int:
        """The last position of the segment that is accounted for: a user may leave before the planned end."""
        return max(self.span.start, self.span.start + self._reached - self._reached_before - 1)

    def catch_up(self, *, is_training: bool = True) -> float:
        """Bring all ranks up to date with the rank that trained alone, if any; returns the time it took, in s.

        All ranks call this. If `is_training`, the time is charged like that of an average.
        """
        self.threads.work_beside_others()
        if self._lead is None:
            return 0.0
        lead, self._lead = self._lead, None
        started_s = time.perf_counter()
        with self.activity.during("average"):
            self.averages.hand_over(lead.source, at=lead.at, with_loop=lead.with_loop)
        self.num_rests += lead.with_loop
        self._led_by = None if self._may_lag else lead.source
        elapsed_s = time.perf_counter() - started_s
        self._recorder.event("hand over", source=lead.source, ms=round(elapsed_s * 1e3, 3))
        if is_training:
            self.meter.add_exposed(elapsed_s)
        self.meter.restart_clocks()
        return elapsed_s

    def _merge(self, effect: Merge) -> None:
        with self.activity.during("average"):
            settled = self.averages.merge(effect.samples, self.facts(is_dry=True), may_undo=self.ends_early)
        # Not an average of the policy, but its facts report the cost of the last one.
        told = as_report(self._windows, settled.facts, settled.drift)
        self.meter.charge(told, is_blocking=True, is_average=False)

    def merge_again(self) -> None:
        """Merge again for the final model, if a checkpoint undid the last merge; all ranks call this."""
        if self.averages.is_unmerged:
            self._merge(Merge(samples=0))

    def _taken(self, planned: int) -> int:
        """Samples since the last average; fewer than the policy planned if the user left the loop early."""
        return min(planned, self.meter.window_samples)

    def facts(self, *, is_dry: bool = False) -> list[float]:
        """The facts that this rank sends with its next average."""
        loss = self._replica.loss_sums.since_last()
        self.activity.saw_loss(*loss)
        return self.meter.facts(
            loss=loss,
            is_dry=is_dry,
            wants_stop=self._stop_requested(),
            wants_pause=self._pause_due(),
            wants_layout=self.averages.wants_layout(),
        )

    def _report(self, settled: Settled, *, kind: str, is_blocking: bool, is_average: bool = True) -> AverageReport:
        report = as_report(self._windows, settled.facts, settled.drift)
        self._windows += 1
        # Count what was averaged, not what was reported: a device reports a shared step with the next one.
        self._reached += settled.total_samples
        self._drift = settled.drift
        self._is_stopped = self._is_stopped or report.wants_stop
        self._is_paused = (self._is_paused or report.wants_pause) and not self._is_stopped
        self._is_cut = (self._is_cut or report.wants_layout) and not self.ends_early
        waited_s = self.meter.charge(report, is_blocking=is_blocking, is_average=is_average)
        self._record_wait(report, waited_s)
        self._on_report(kind, report)
        return report

    def _record_wait(self, report: AverageReport, waited_s: float) -> None:
        """Record how long the previous average waited for others; only the reports of all ranks tell."""
        self._recorder.add_wait("average", waited_s)
        self.activity.waited(waited_s)
        # One event per window. Shared steps are too many for that; the end of the epoch has their sum.
        if report.drift is not None and waited_s >= 1e-4:
            self._recorder.event("wait", cause="average", window=report.window - 1, ms=round(waited_s * 1e3, 3))

    def _record_average(self, report: AverageReport, elapsed_s: float) -> None:
        self.activity.averaged(elapsed_s)
        ms = round(elapsed_s * 1e3, 3)
        num_bytes = self.averages.sizes.bytes
        self._recorder.event("average end", window=report.window, ms=ms, drift=report.drift, bytes=num_bytes)

    def _note(self, effect: Note) -> None:
        decision = effect.decision
        if decision.kind == "plan":
            self._anchor = decision.details["anchor"]
        # All ranks decide the same, so one of them records it.
        if self._replica.rank == 0:
            self._recorder.event(decision.kind, value=decision.value, reason=decision.reason, **decision.details)
            if decision.kind == "policy":
                self._on_choice(decision)

    def _wait_for_device(self) -> None:
        with self.activity.during("compute"):
            self.meter.wait_for_device(self.averages.wait_for_device)
        self._replica.check_loss()
        self._replica.check_finite()

    def _end_window(self) -> None:
        """Close the window; its average comes next."""
        self._measure_window()
        self._recorder.event("average start", window=self._windows)

    def _measure_window(self) -> None:
        if self.meter.is_on_device:
            self._replica.watch_loss()
        self.meter.end_window(self._windows)
