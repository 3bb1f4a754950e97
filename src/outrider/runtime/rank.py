"""The life of one rank: set up, epochs, metrics, checkpoints, and what the run leaves behind.

Decides the order of things in a run; steps and averages are the driver's, the schedule is the policy's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from outrider.core.effects import Lease, Seat
from outrider.core.planner import Planner
from outrider.core.policies import open_policy
from outrider.core.schedule import ScheduleRecorder
from outrider.core.split import Splitter
from outrider.data.augmented_feed import AugmentFunction
from outrider.data.feed import Feed, make_feed
from outrider.data.order import in_order, shuffled
from outrider.errors import DataError
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica
from outrider.runtime import checkpoint
from outrider.runtime.averages import Averages, make_averages
from outrider.runtime.books import Books, open_leases
from outrider.runtime.config import RunConfig
from outrider.runtime.context import EpochContext
from outrider.runtime.driver import Driver
from outrider.runtime.epoch_end import EpochEnd
from outrider.runtime.evaluation import Evaluation
from outrider.runtime.folder import RunFolder, load_into
from outrider.runtime.messages import Link
from outrider.runtime.metrics import EpochMetrics, as_json
from outrider.runtime.record import commit, gpu_uuid, write_record, write_schedule, write_timeline
from outrider.runtime.rehearse import agree_on_format, decide_execution
from outrider.runtime.stepper import Stepper
from outrider.runtime.throttle import Throttle
from outrider.runtime.world import World
from outrider.timeline.recorder import Recorder

PROGRESS_EVERY_S = 0.25


def train_rank(
    link: Link, recipe: Recipe, config: RunConfig, *, world: World, setting: RunSetting
) -> Iterator[EpochMetrics]:
    """Train on this rank; yields each epoch's metrics, which are the same on every rank."""
    with contextlib.ExitStack() as stack:
        rank = RankRun(link, recipe, config, world=world, setting=setting)
        stack.callback(rank.close)
        rank.prepare()
        while (epoch := rank.next_epoch()) is not None:
            metrics = rank.run_epoch(epoch)
            if metrics is not None:
                yield metrics
        rank.finish()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSetting:
    """What the starter decided before the ranks began, the same on all."""

    folder: Path
    origin_s: float
    """Wall-clock time of the run's start."""
    backend: str
    devices: tuple[str, ...]


class RankRun:
    """One rank's run, from the model to the last record."""

    def __init__(self, link: Link, recipe: Recipe, config: RunConfig, *, world: World, setting: RunSetting) -> None:
        self.link = link
        self.recipe = recipe
        self.config = config
        self.world = world
        self.folder = RunFolder(setting.folder)
        self.backend = setting.backend
        self.devices = setting.devices
        self.started_at = datetime.fromtimestamp(setting.origin_s).astimezone().isoformat(timespec="seconds")
        self.commit = commit() if world.rank == 0 else None
        self.recorder = Recorder(world.rank, origin_s=setting.origin_s)
        self.planner = Planner(recipe.planner_config(world.size))
        self.splitter = Splitter(
            world_size=world.size, shares=recipe.shares, speed_hints=recipe.speed_hints, may_rest=True
        )
        self.epoch = 0
        self.position = 0
        self.train_s = 0.0
        self.history: list[dict[str, Any]] = []
        self.schedules: list[list[Any]] = []
        self.is_over = False
        self._first_epoch_s: float | None = None
        self._last_progress_s = 0.0
        self._feeds: list[Feed] = []
        self.averages: Averages | None = None

    # Set-up

    @property
    def num_samples(self) -> int:
        return self.feed.num_samples

    def prepare(self) -> None:
        """Everything up to the first step; all ranks leave with the same parameters."""
        recipe, world = self.recipe, self.world
        self.recorder.event("joined")
        self.replica = Replica(recipe, device=world.device, rank=world.rank, name=str(world.spec))
        self.feed = self._open_feed(recipe.dataset, augment=recipe.augment)
        self.recorder.event("data open")
        check_num_samples(self.feed.num_samples, world_size=world.size)
        agree_on_format(self.replica, self.feed, world=world, devices=self.devices, recorder=self.recorder)
        self.averages = make_averages(self.replica, world, backend=self.backend, verify=self.config.verify)
        self.driver = Driver(
            replica=self.replica,
            feed=self.feed,
            averages=self.averages,
            throttle=Throttle(world.spec.speed),
            recorder=self.recorder,
            stop_requested=self.link.stop_requested.is_set,
            on_step=self._tell_progress,
        )
        self.stepper = Stepper(self.driver, self.replica)
        self.books = Books(self.driver, self.replica, world)
        has_callbacks = bool(self.config.epoch_start or self.config.epoch_end)
        self.epoch_end = EpochEnd(self.driver, self._open_evaluation(), world=world, has_callbacks=has_callbacks)
        average_state = self._resume(checkpoint.find(self.config.resume)) if self.config.resume else None
        self.averages.start_from_rank_zero()
        self.averages.restore(average_state)
        decide_execution(self.replica, self.feed, recorder=self.recorder)
        self.recorder.event("ready", device=str(world.spec), gpu=gpu_uuid(world.device), feed=self.feed.reason)
        self._record_compensation()
        if world.rank == 0:
            write_record(self.folder, self, status="running")

    def _record_compensation(self) -> None:
        chosen = self.replica.compensation
        if self.world.rank == 0:
            value = {"outer": chosen.outer.kind, "learning rate follows ranks": chosen.follows_ranks}
            self.recorder.event("compensation", value=value, reason=chosen.reason)

    def _open_feed(self, dataset: Any, *, augment: AugmentFunction | None = None) -> Feed:
        feed = make_feed(
            dataset,
            device=self.world.device,
            workers=self.config.workers,
            collate=self.config.collate,
            resident=self.config.resident,
            seed=self.recipe.seed,
            augment=augment,
        )
        self._feeds.append(feed)
        return feed

    def _open_evaluation(self) -> Evaluation | None:
        if self.recipe.evaluate is None:
            return None
        feed = self._open_feed(self.recipe.eval_dataset)
        return Evaluation(self.replica, feed, partial(open_leases, self.world), world_size=self.world.size)

    # Epochs

    def next_epoch(self) -> int | None:
        return None if self.is_over or self.epoch >= self.recipe.epochs else self.epoch

    def run_epoch(self, epoch: int) -> EpochMetrics | None:
        """One epoch with its evaluation and callbacks; None when a callback stopped the run before it began."""
        if self._stops_before(epoch):
            return None
        self._start_epoch(epoch)
        started_s = time.perf_counter()
        for span in self._segments():
            self._run_segment(epoch, span)
            if self.driver.is_stopped:
                break
        self.epoch_end.catch_up(is_saving=self._is_checkpoint_due(epoch + 1) or self.driver.is_stopped)
        seconds = time.perf_counter() - started_s
        metrics = self._conclude(epoch, seconds)
        self._agree_to_stop(self._call(self.config.epoch_end, epoch, metrics))
        self._go_on(metrics)
        return metrics

    def _stops_before(self, epoch: int) -> bool:
        """Whether a callback or the handle wants no further epoch; the run can then be resumed from here."""
        asked = self._call(self.config.epoch_start, epoch, None)
        self._agree_to_stop(asked or self.link.stop_requested.is_set())
        if self.is_over:
            self._save_checkpoint(epoch, self.position)
        return self.is_over

    def _agree_to_stop(self, wants_stop: bool) -> None:
        """The run is over where any rank wants it to be; all ranks call this in the same order."""
        self.is_over = any(self.world.exchange_json(wants_stop, name="wishes to stop")) or self.is_over

    def _call(self, callback: Callable[[EpochContext], None] | None, epoch: int, metrics: EpochMetrics | None) -> bool:
        """Call the user's callback, where there is one; whether it asked to stop."""
        if callback is None:
            return False
        context = EpochContext(
            epoch=epoch,
            rank=self.world.rank,
            is_main=self.world.rank == 0,
            model=self.replica.model,
            optimizer=self.replica.optimizer,
            metrics=metrics,
        )
        self.replica.call_user("epoch_start" if metrics is None else "epoch_end", callback, context)
        return context.wants_stop

    def _start_epoch(self, epoch: int) -> None:
        num_samples = self.feed.num_samples
        order = (
            shuffled(num_samples, seed=self.recipe.seed, epoch=epoch) if self.recipe.shuffle else in_order(num_samples)
        )
        self.feed.start_epoch(order, epoch)
        self.books.open()
        # Ranks set up at different speeds: time starts when all are here.
        waited_s = self._barrier(f"the start of epoch {epoch}")
        self.recorder.wait("startup" if self._first_epoch_s is None else "epoch boundary", waited_s)
        if self._first_epoch_s is None:
            before_s = self.history[-1]["wall_s"] if self.history else 0.0
            self._first_epoch_s = time.perf_counter() - before_s
        self.recorder.event("epoch start", epoch=epoch)

    def _barrier(self, what: str) -> float:
        started_s = time.perf_counter()
        self.world.barrier(what, timeout_s=self.config.timeout_s)
        return time.perf_counter() - started_s

    def _segments(self) -> Iterator[Lease]:
        """The rest of the epoch, cut where checkpoints are due."""
        num_samples = self.feed.num_samples
        every = self.config.checkpoint_every
        cut = num_samples if every is None or every >= 1 else max(1, round(num_samples * every))
        start = self.position
        while start < num_samples:
            stop = min(num_samples, (start // cut + 1) * cut)
            yield Lease(start, stop - start)
            start = stop

    def _run_segment(self, epoch: int, span: Lease) -> None:
        seat = Seat(self.world.rank, self.world.size, self.recipe.batch_size)
        policy = open_policy(
            self.recipe.policy,
            seat,
            span,
            planner=self.planner,
            splitter=self.splitter,
            max_overshoot=self.recipe.max_overshoot,
        )
        leases = open_leases(self.world, f"ledger/{epoch}/{span.start}", span, batch_size=self.recipe.batch_size)
        reached_before = self.driver.reached
        self.driver.schedule = ScheduleRecorder() if self.config.record_schedule else None
        self.stepper.run(policy, leases=leases, epoch_base=epoch * self.feed.num_samples)
        if self.driver.schedule is not None:
            self.schedules.append(self.driver.schedule.entries)
        is_whole = not self.driver.is_stopped or self.recipe.policy == "independent"
        self.position = span.stop if is_whole else span.start + self.driver.reached - reached_before
        if self.config.checkpoint_every is not None and self.position < self.feed.num_samples:
            self._save_checkpoint(epoch, self.position)

    def _conclude(self, epoch: int, seconds: float) -> EpochMetrics:
        evaluated = self.epoch_end.evaluate(f"eval/{epoch}/{self.position}")
        assert self._first_epoch_s is not None
        metrics = self.books.close(
            epoch,
            seconds=seconds,
            evaluated=evaluated,
            wants_stop=self.link.stop_requested.is_set(),
            train_s_before=self.train_s,
            first_s=self._first_epoch_s,
            is_complete=self.position >= self.feed.num_samples,
        )
        if self.splitter.lone is not None:
            self.epoch_end.judge(self.books.accounts, lone=self.splitter.lone)
        self.is_over = self.is_over or self.driver.is_stopped or self.books.wants_stop
        return metrics

    def _go_on(self, metrics: EpochMetrics) -> None:
        """Book the epoch, and save what is due."""
        self.train_s = metrics.train_s
        self.history.append(as_json(metrics))
        if metrics.is_complete:
            self.epoch += 1
            self.position = 0
        # A run that was stopped can always be resumed.
        if self.is_over or self._is_checkpoint_due(self.epoch):
            self._save_checkpoint(self.epoch, self.position)
        if self.world.rank == 0:
            write_record(self.folder, self, status="running")

    def _is_checkpoint_due(self, epochs: int) -> bool:
        """Whether one is to be saved after so many epochs."""
        every = self.config.checkpoint_every
        return every is not None and epochs % max(1, round(every)) == 0

    def finish(self) -> None:
        """Leave the model, the record and the merged timeline behind."""
        self.driver.catch_up()
        timelines = self.world.exchange_json(self.recorder.events)
        schedules = self.world.exchange_json(self.schedules) if self.config.record_schedule else None
        if self.world.rank == 0:
            self.folder.write_model(self.replica.model.state_dict())
            write_timeline(self.folder, timelines)
            if schedules is not None:
                write_schedule(self.folder, schedules)
            write_record(self.folder, self, status="stopped" if self.epoch < self.recipe.epochs else "finished")
        self._barrier("the end of the run")

    def close(self) -> None:
        if self.averages is not None:
            self.averages.close()
        for feed in self._feeds:
            feed.close()

    def _tell_progress(self) -> None:
        now_s = time.perf_counter()
        if now_s - self._last_progress_s < PROGRESS_EVERY_S:
            return
        self._last_progress_s = now_s
        self.link.send(
            "progress",
            epoch=self.epoch,
            samples=self.driver.samples,
            num_samples=self.feed.num_samples,
            anchor=self.driver.anchor,
            loss=self.replica.tally.mean_so_far() if self.world.device.type == "cpu" else None,
        )

    # Checkpoints

    def _identity(self) -> dict[str, Any]:
        return checkpoint.identity(self.recipe) | {
            "num_samples": self.feed.num_samples,
            "optimizer": type(self.replica.optimizer).__name__,
            "scheduler": type(self.replica.scheduler).__name__ if self.replica.scheduler else None,
        }

    def _save_checkpoint(self, epoch: int, position: int) -> None:
        self.driver.catch_up()
        progress = checkpoint.Progress(
            epoch=epoch,
            position=position,
            windows=self.driver.windows,
            train_s=self.train_s,
            planner=self.planner.state(),
            splitter=self.splitter.state(),
            epochs=self.history,
            identity=self._identity(),
        )
        assert self.averages is not None
        state = self.replica.state() | {"average": self.averages.state()}
        checkpoint.save(
            self.folder, progress, rank=self.world.rank, model=self.replica.model.state_dict(), rank_state=state
        )
        self._barrier("all ranks' parts of a checkpoint")
        if self.world.rank == 0:
            path = checkpoint.commit(self.folder, progress)
            self.recorder.event("checkpoint", epoch=epoch, position=position, path=path.name)

    def _resume(self, path: Path) -> dict[str, Any] | None:
        """Go back to where the checkpoint was taken; returns what the averages need once they have begun."""
        progress = checkpoint.load_progress(path, identity=self._identity())
        load_into(self.replica.model, path / "model.safetensors")
        state = checkpoint.load_rank(path, self.world.rank)
        self.replica.restore(state)
        same_world = len(progress.planner.get("paces", ())) in (0, self.world.size)
        if same_world:
            self.planner.restore(progress.planner)
            self.splitter.restore(progress.splitter)
        self.driver.windows = progress.windows
        self.epoch, self.position, self.train_s = progress.epoch, progress.position, progress.train_s
        self.history = list(progress.epochs)
        if self.world.rank == 0:
            self.recorder.event("resume", epoch=self.epoch, position=self.position, path=path.name)
        average_state: dict[str, Any] | None = state["average"]
        return average_state


def check_num_samples(num_samples: int, *, world_size: int) -> None:
    """Every rank needs a sample; asked before ranks start where the data set is there already, and by each rank."""
    if num_samples < world_size:
        raise DataError(
            f"the data set has {num_samples} sample{'' if num_samples == 1 else 's'} for {world_size} ranks",
            hint="use fewer devices, or a larger data set",
        )
