"""The life of one rank, from its replica to the last record; shared by `train()` and `Session`.

Decides the order of tasks common to all runs: average, resume, count epochs, save checkpoints, record, end. `TrainRun`
(its own steps) and `SessionRun` (the user's loop) are the sources of steps; they call it on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from outrider.data.epoch_pass import EpochPass
from outrider.errors import DataError
from outrider.policy.alone import LONGEST_STRETCH_S
from outrider.policy.batch_splitter import Splitter
from outrider.policy.effects import AverageReport, Decision, Lease, Seat
from outrider.policy.policies import open_policy
from outrider.policy.policy_chooser import PolicyChooser
from outrider.policy.remaining import Remaining
from outrider.policy.window_planner import WindowPlanner
from outrider.rank.averages import Averages, make_averages
from outrider.rank.device_clock import DeviceClocks
from outrider.rank.device_speed import gains_alone, speeds_of_all
from outrider.rank.driver import Driver, Segment
from outrider.rank.epoch_accounting import EpochAccounting, open_leases
from outrider.rank.host_threads import HostThreads
from outrider.rank.layout_watch import set_trained
from outrider.rank.live_values import LiveValues
from outrider.rank.memory_needs import agree_on_memory, memory_event, memory_words
from outrider.rank.meter import Meter
from outrider.rank.peak_memory import peak_memory_bytes
from outrider.rank.run_trackers import RunTrackers, tracked_values
from outrider.rank.segment_border import SegmentBorder
from outrider.rank.shared_evaluation import EvaluationSums
from outrider.rank.throttle import Throttle
from outrider.rank.trial_log import TrialLog
from outrider.record import checkpoint
from outrider.record import run_config as configs
from outrider.record.checkpoint_schedule import CheckpointClock
from outrider.record.checkpoint_writer import Checkpoints
from outrider.record.disk_space import check_room, keep_record
from outrider.record.epoch_log import EpochLog
from outrider.record.epoch_metrics import EpochMetrics, as_json
from outrider.record.resume import Resumed, read_checkpoint, where_to_resume
from outrider.record.run_config import RunConfig
from outrider.record.run_events import RunEvents
from outrider.record.run_folder import RunFolder, load_into
from outrider.record.run_forecast import open_receipt
from outrider.record.run_record import commit
from outrider.replica import recipe as recipes
from outrider.replica.finite import refuse_to_save
from outrider.replica.portable_state import other_settings
from outrider.replica.rank_replica import RankReplica
from outrider.replica.recipe import LoopRecipe
from outrider.world.messages import Link
from outrider.world.world import World

# The part of `timeout_s`, and of `grace_s`, for which resting ranks wait for a rank that works alone.
# All ranks see a request to stop when they meet.
STRETCH_PART = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSetting:
    """Settings decided before the ranks start, the same on all ranks."""

    folder: Path
    origin_s: float
    """Wall-clock time of the run's start."""
    backend: str
    devices: tuple[str, ...]
    is_trial: bool = False
    """Whether `outrider advise` only measures the run: it leaves reports, but no model and no checkpoint."""


class RankLife:
    """The run of one rank: `adopt()` a replica, `resume()`, train epochs, `finish()`, `close()`."""

    def __init__(
        self,
        link: Link,
        recipe: LoopRecipe,
        config: RunConfig,
        *,
        world: World,
        setting: RunSetting,
        may_rest: bool,
        only_alone: int | None = None,
    ) -> None:
        """`may_rest`: whether ranks may leave whole batches to a fast one, which may be any or `only_alone`."""
        self.link = link
        self.recipe = recipe
        self.config = config
        self.world = world
        self.folder = RunFolder(setting.folder)
        self.backend = setting.backend
        self.devices = setting.devices
        self.started_at = datetime.fromtimestamp(setting.origin_s).astimezone().isoformat(timespec="seconds")
        self.commit = commit() if world.rank == 0 else None
        self.events = RunEvents(self.folder, world, origin_s=setting.origin_s, has_schedule=config.record_schedule)
        self.recorder = self.events.recorder
        self.history: list[dict[str, Any]] = []
        self.num_samples = 0
        self.loop_options: dict[str, Any] = {}
        """Batch size and length of a user's loop, which `train()` has in its recipe; batches of a batch sampler."""
        self.clock = CheckpointClock(config.every, rank=world.rank)
        self.splitter = Splitter(
            world_size=world.size,
            shares=recipe.shares,
            speed_hints=recipe.speed_hints,
            may_rest=may_rest,
            only_alone=only_alone,
            shares_first=setting.is_trial,
            longest_stretch_s=min(LONGEST_STRETCH_S, STRETCH_PART * config.timeout_s, STRETCH_PART * config.grace_s),
        )
        self.chooser = PolicyChooser(world_size=world.size)
        self.on_choice = self._send_choice
        """Called on rank 0 when the policy `auto` has chosen; a session informs its user itself."""
        self._checkpoints = Checkpoints(link, world, self.folder, config=config, recorder=self.recorder)
        self._epoch_log = EpochLog(self.folder)
        self._planners: dict[int, WindowPlanner] = {}
        self._speeds: tuple[float, ...] | None = None
        self._first_s: float | None = None
        self._num_segments = 0
        self._averages: Averages | None = None
        self.memory_words: str | None = None
        """The memory that the run needs per rank, in words; None for small models."""
        self._trial_log = TrialLog(setting.folder, rank=world.rank) if setting.is_trial else None
        is_tracked = world.rank == 0 and not setting.is_trial
        self._trackers = RunTrackers(config.trackers if is_tracked else (), warn=link.warn)
        self._live = LiveValues(world.size)
        self._continues: Path | None = None
        """The folder of the run that this one continues."""
        self.resumed_from: str | None = None
        """The name of the checkpoint that this process started from."""

    @property
    def is_trial(self) -> bool:
        """Whether the run is only measured: it leaves no model and no checkpoint."""
        return self._trial_log is not None

    @property
    def is_main(self) -> bool:
        return self.world.rank == 0

    # Set-up

    def adopt(
        self,
        replica: RankReplica,
        *,
        clocks: DeviceClocks | None = None,
        may_lag: bool = True,
        stop_requested: Callable[[], bool],
        pause_due: Callable[[], bool],
        on_step: Callable[[], None] = lambda: None,
        samples_seen: Callable[[], int],
        steps_at: Callable[[int], int],
    ) -> None:
        """Set up a replica on this rank. All ranks call this; it raises if their layouts differ.

        `samples_seen` returns the samples of the whole world so far; `steps_at` converts them to steps of one device.
        """
        self.replica = replica
        self._samples_seen, self._steps_at = samples_seen, steps_at
        needs = agree_on_memory(replica, self.world)
        self.recorder.event("memory", **memory_event(needs[self.world.rank]))
        self.memory_words, self.memory_later = memory_words(needs), needs[self.world.rank].later
        backend = self.config.backend_spec(self.backend)
        averages = make_averages(replica, self.world, backend=backend, verify=self.config.verify)
        self._averages = averages
        meter = Meter(
            rank=self.world.rank, throttle=Throttle(self.world.spec.speed), recorder=self.recorder, clocks=clocks
        )
        self.driver = Driver(
            replica=replica,
            averages=averages,
            meter=meter,
            recorder=self.recorder,
            border=SegmentBorder(self.world),
            threads=self._host_threads(replica),
            may_lag=may_lag,
            stop_requested=stop_requested,
            pause_due=pause_due,
            on_step=on_step,
            on_choice=lambda decision: self.on_choice(decision),
            on_report=self._keep_report if self.is_trial else self._track_report,
        )
        self.accounting = EpochAccounting(self.driver, replica, self.world, recorder=self.recorder)

    def _host_threads(self, replica: RankReplica) -> HostThreads:
        """The threads of this rank; always as many if code is compiled for their number, or a replay repeats steps."""
        own, alone = self.link.num_threads, self.link.num_threads_alone
        return HostThreads(own, own if replica.is_compiled or self.config.record_schedule else alone)

    def _keep_report(self, kind: str, report: AverageReport) -> None:
        assert self._trial_log is not None
        sizes = self.driver.averages.sizes
        self._trial_log.saw(kind, report, seen=self.driver.seen, num_bytes=sizes.bytes, parameters=sizes.trained)

    def _track_report(self, kind: str, report: AverageReport) -> None:
        if self._trackers.is_empty:
            return
        self._live.saw(report)
        if self._live.is_due:
            values = {**self._live.take(), "live/learning_rate": self.replica.learning_rate}
            self._trackers.log(values, self._steps_at(self._samples_seen()))

    def _send_choice(self, decision: Decision) -> None:
        self.link.send("choice", value=decision.value, reason=decision.reason)

    def resume(self, identity: Mapping[str, Any]) -> Resumed | None:
        """Load the checkpoint that the user named, if any. Afterwards all ranks have the same parameters."""
        assert self._averages is not None
        self._checkpoints.check_can_save(self.replica.state())
        path = where_to_resume(self, self.config.resume)
        resumed = None if path is None else read_checkpoint(self, resume=path, identity=dict(identity))
        if resumed is not None:
            self._go_back(resumed)
            self.resumed_from = resumed.path.name
            # Several runs may start from one named checkpoint, but a run folder stands for one run that continues.
            self._continues = None if path == resumed.path else path
        self._averages.start_from_rank_zero()
        self._averages.restore(None if resumed is None else resumed.average)
        if resumed is not None and resumed.needs_common_optimizer:
            self._averages.hand_over(0, at=0)
        if self._needs_speeds(resumed):
            self._measure_devices()
        if self.recipe.policy_spec.batch_is_global and self.splitter.may_rest:
            self._measure_gains()
        return resumed

    def _needs_speeds(self, resumed: Resumed | None) -> bool:
        """Whether batches depend on speeds that are still unknown."""
        spec = self.recipe.policy_spec
        if spec.batch_is_global:
            return self.splitter.needs_hints
        is_known = resumed is not None and resumed.is_same_world
        is_given = self.recipe.shares is not None or self.recipe.speed_hints is not None
        return self.world.size > 1 and spec.averages and not spec.shares_steps and not is_known and not is_given

    def _measure_devices(self) -> None:
        """Measure the devices before the first step, as hints for planners and splitter; all ranks call this."""
        speeds = speeds_of_all(self.world)
        self.recorder.event("speeds", value=[round(speed, 3) for speed in speeds])
        self.splitter.hint(speeds)
        self._speeds = speeds

    def _measure_gains(self) -> None:
        """Measure what a rank gains from the cores of ranks that rest; all ranks call this at every start."""
        gains = gains_alone(self.world, self.driver.threads, fastest=self.splitter.fastest)
        if max(gains) > 1:
            self.recorder.event("gains alone", value=[round(gain, 3) for gain in gains])
        self.splitter.expect_gains(gains)

    def _go_back(self, resumed: Resumed) -> None:
        progress = resumed.progress
        load_into(self.replica.model, resumed.path / checkpoint.MODEL_FILE)
        self._freeze_as(resumed.state)
        self._tell_other_settings(resumed.state)
        self.replica.restore(resumed.state)
        if resumed.is_same_world:
            self.splitter.restore(progress.splitter)
            if progress.chooser is not None:
                self.chooser.restore(progress.chooser)
            for batch_size, state in progress.planner.items():
                self.planner(int(batch_size)).restore(state)
        self.driver.go_on(progress.windows)
        self.history = list(progress.epochs)
        self.accounting.go_on(progress.accounts)

    def _tell_other_settings(self, state: Mapping[str, Any]) -> None:
        saved = state["optimizers"] if "optimizers" in state else [state["optimizer"]]
        pairs = zip(self.replica.optimizers, saved, strict=False)
        words = [word for optimizer, before in pairs for word in other_settings(optimizer, before)]
        if self.is_main and words:
            self.link.warn(f"the optimizer goes on with the settings of the checkpoint: {', '.join(words)}")

    def _freeze_as(self, state: Mapping[str, Any]) -> None:
        """Train the same parameters as when the checkpoint was saved, whatever was thawed since the start."""
        assert self._averages is not None
        layout = self.replica.arena.layout
        trained, changing = state.get("trained"), state.get("changing", ())
        # Older checkpoints lack these entries.
        if trained is None or (trained == layout.trained and frozenset(changing) == layout.changing):
            return
        set_trained(self.replica.model, trained)
        self._averages.lay_out_as(changing=changing)

    def planner(self, batch_size: int) -> WindowPlanner:
        if batch_size not in self._planners:
            config = self.recipe.planner_config(self.world.size, batch_size=batch_size)
            self._planners[batch_size] = WindowPlanner(config)
            if self._speeds is not None:
                self._planners[batch_size].hint(self._speeds)
        return self._planners[batch_size]

    def begin_record(self) -> None:
        """Rank 0 checks disk space, writes the first record, and starts the trackers."""
        if self.is_main:
            if not self.world.has_one_torch:
                self.recorder.event("builds", value=[asdict(build) for build in self.world.builds])
            check_room(self, self.replica)
            open_receipt(self.folder, self._described())
            self._epoch_log.begin(self)
            with self.link.unwatched():
                step = self._steps_at(self._samples_seen())
                self._trackers.start(self.folder, config=self._tracked(), step=step, continues=self._continues)

    def _tracked(self) -> dict[str, Any]:
        """What trackers show of a run besides its values."""
        described = self._described()
        options = described.pop("options")
        return {**options, **described, "backend": self.backend, "world_size": self.world.size, "commit": self.commit}

    @property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return self.driver.averages.sizes.trained

    def _described(self) -> dict[str, Any]:
        """The facts by which a forecast is matched to this run."""
        return {
            "policy": self.recipe.policy_spec.name,
            "devices": self.devices,
            "num_samples": self.num_samples,
            "parameters": self.parameters,
            "options": recipes.settings(self.recipe) | configs.settings(self.config) | self.loop_options,
        }

    # Epochs

    def start_clock(self, epoch: int, *, waited_s: float) -> None:
        """Start an epoch after all ranks have arrived; the run's time starts with the first epoch."""
        self.recorder.wait("startup" if self._first_s is None else "epoch boundary", waited_s)
        if self._first_s is None:
            before_s = (self.history[-1]["wall_s"] if self.history else 0.0) + self.accounting.seconds_before
            self._first_s = time.perf_counter() - before_s
        self.recorder.event("epoch start", epoch=epoch)
        self._live.restart()

    def next_segment(self, current: EpochPass, *, may_stay_open: bool = False) -> Segment:
        """The next part of a pass, up to the next checkpoint within the epoch; all ranks call this.

        With `may_stay_open` the last part of a pass ends without an average, if the policy supports that.
        """
        recipe, world, batch_size = self.recipe, self.world, current.batch_size
        span = current.next_span(
            every=self.config.every.epochs, unit=recipe.step_samples(world.size, batch_size=batch_size)
        )
        self._num_segments += 1
        own_size = recipe.own_batch_size(world.rank, batch_size=batch_size)
        policy = open_policy(
            recipe.policy_spec,
            Seat(world.rank, world.size, own_size),
            span,
            planner=self.planner(batch_size),
            splitter=self.splitter,
            max_overshoot=recipe.max_overshoot,
            samples_after=current.samples_after,
            chooser=self.chooser,
            window=self.driver.open_window,
            may_stay_open=may_stay_open and world.size > 1 and span.count == current.left,
        )
        return Segment(
            policy=policy,
            span=span,
            leases=open_leases(world, f"ledger/{self._num_segments}", span, batch_size=own_size),
            feed=current.feed,
            seen=current.seen,
            batch_size=batch_size,
            schedule=self.events.begin_segment(current.epoch, span, is_unmerged=self.driver.averages.is_unmerged),
        )

    def left_of_segment(self) -> tuple[Lease, ...]:
        """The positions of the last segment that no rank used, because it ended early."""
        ends_early = self.driver.ends_early or self.driver.is_cut
        return self.driver.left_of_segment() if ends_early and self.recipe.policy_spec.averages else ()

    def conclude(self, epoch: int, *, seconds: float, evaluated: EvaluationSums, is_complete: bool) -> EpochMetrics:
        """Close an epoch; returns the metrics of the world, the same on every rank. All ranks call this."""
        assert self._first_s is not None
        metrics = self.accounting.close(
            epoch,
            seconds=seconds,
            evaluated=evaluated,
            wants_stop=self.link.wants_stop,
            is_checkpoint_due=self.clock.is_due(),
            train_s_before=train_seconds(self.history),
            first_s=self._first_s,
            is_complete=is_complete,
        )
        self.history.append(as_json(metrics))
        return metrics

    def metrics_so_far(
        self, epoch: int, *, seconds: float, is_complete: bool, wants_stop: bool = False
    ) -> EpochMetrics:
        """The metrics of the world in mid-epoch, without evaluation, the same on every rank; all ranks call this."""
        assert self._first_s is not None
        self.accounting.tell(seconds=seconds, wants_stop=wants_stop)
        return self.accounting.merged(
            self.accounting.so_far,
            epoch=epoch,
            train_s_before=train_seconds(self.history),
            first_s=self._first_s,
            is_complete=is_complete,
        )

    def is_checkpoint_due(self, epochs_done: int) -> bool:
        """Whether a checkpoint is due at the end of an epoch, by epochs or rank 0's clock; the same on all ranks."""
        return self.config.every.is_due_after(epochs_done) or self.accounting.is_checkpoint_due

    def log_epoch(self) -> None:
        """Rank 0 records the last concluded epoch and sends it to the trackers."""
        if self.is_main:
            self._epoch_log.add(self)
            seen = self._samples_seen()
            values = tracked_values(self.history[-1], self.accounting.accounts, samples_seen=seen)
            with self.link.unwatched():
                self._trackers.log(values, self._steps_at(seen))

    # Checkpoints

    def save(
        self,
        epoch: int,
        *,
        position: int,
        remaining: Remaining | None,
        is_mid_epoch: bool,
        identity: Mapping[str, Any],
        passes: int = 0,
        rank_state: Mapping[str, Any] | None = None,
        is_last: bool = False,
    ) -> None:
        """Save a checkpoint; all ranks call this. `rank_state` is added to the replica's state."""
        assert self._averages is not None
        if self.is_trial:
            return
        self.driver.catch_up()
        refuse_to_save(self.replica)
        epochs, accounts = self.history, self.accounting.so_far
        if is_mid_epoch and epochs and epochs[-1]["epoch"] == epoch:
            # A run that stopped, or whose steps end here, has already reported this epoch. Once resumed, it reports
            # the whole epoch.
            epochs, accounts = epochs[:-1], self.accounting.accounts
        progress = checkpoint.Progress(
            epoch=epoch,
            position=position,
            remaining=None if remaining is None else remaining.state(),
            passes=passes,
            accounts=[asdict(account) for account in accounts],
            windows=self.driver.windows,
            train_s=train_seconds(epochs),
            planner={str(batch_size): planner.state() for batch_size, planner in self._planners.items()},
            splitter=self.splitter.state(),
            chooser=self.chooser.state(),
            epochs=epochs,
            identity=dict(identity),
        )
        model = checkpoint.merged_model(
            self.replica.model, is_mid_epoch=is_mid_epoch, undo_merge=self._averages.undo_merge
        )
        layout = self.replica.arena.layout
        state = self.replica.state() | {
            "average": self._averages.state(),
            "trained": layout.trained,
            "changing": sorted(layout.changing),
            **(rank_state or {}),
        }
        with self.link.unwatched():
            self._checkpoints.save(progress, model=model, rank_state=state, is_last=is_last)
        self.clock.saved()

    def await_checkpoint(self) -> None:
        """Wait until the checkpoint in the background is written."""
        self._checkpoints.finish()

    # The end

    def finish(self, *, status: Callable[[], str]) -> None:
        """Write the record and the merged timeline; all ranks call this, after the model was written."""
        self._checkpoints.finish()
        told = status()
        if self.is_main:
            keep_record(self, status=told)
            with self.link.unwatched():
                self._trackers.finish(told)
        self.events.merge()

    def close(self) -> None:
        """Release files, threads and memory, however the run ended."""
        self._trackers.close()
        self._checkpoints.close()
        self.events.close()
        if self._trial_log is not None:
            self._trial_log.close(peak_memory_bytes(self.world.device))
        if self._averages is not None:
            self._averages.close()


def train_seconds(epochs: Sequence[Mapping[str, Any]]) -> float:
    """Training time up to the end of the last of these epochs."""
    return epochs[-1]["train_s"] if epochs else 0.0


def check_num_samples(num_samples: int, *, world_size: int) -> None:
    """Raise if a rank would get no sample; called before ranks start if the data set is loaded, and by each rank."""
    if num_samples < world_size:
        raise DataError(
            f"the data set has {num_samples} sample{'' if num_samples == 1 else 's'} for {world_size} ranks",
            hint="use fewer devices, or a larger data set",
        )
