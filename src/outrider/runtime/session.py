"""One rank's part of a session: the user's models, passes over data sets, evaluations, metrics and the record.

Decides the order of things that all ranks do together. What the user may call when is the session's business in the
front door; batches and steps are the user loop's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from outrider.core.effects import Lease, Seat, Take
from outrider.core.planner import Planner
from outrider.core.policies import open_policy
from outrider.core.schedule import ScheduleRecorder
from outrider.core.split import Splitter
from outrider.data.feed import Feed
from outrider.data.leases import Leases, LocalLeases
from outrider.data.order import in_order, shuffled
from outrider.replica import recipe as recipes
from outrider.replica.loop_replica import LoopReplica
from outrider.replica.recipe import Recipe
from outrider.runtime import config as configs
from outrider.runtime.averages import make_averages
from outrider.runtime.books import Books, open_leases
from outrider.runtime.config import RunConfig
from outrider.runtime.driver import Driver
from outrider.runtime.evaluation import BATCHES_PER_LEASE, Evaluated
from outrider.runtime.feeds import Feeds, Source
from outrider.runtime.folder import SCHEMA_VERSION, RunFolder
from outrider.runtime.messages import Link
from outrider.runtime.metrics import EpochMetrics, as_json
from outrider.runtime.rank import check_num_samples
from outrider.runtime.record import commit, write_record, write_schedule, write_timeline
from outrider.runtime.throttle import Throttle
from outrider.runtime.user_loop import UserLoop
from outrider.runtime.world import World
from outrider.timeline.recorder import Recorder

EvaluateAll = Callable[[Any, Any], torch.Tensor | float]


class SessionRun:
    """From the user's models to the last record, on one rank."""

    def __init__(
        self, link: Link, world: World, recipe: Recipe, config: RunConfig, *, backend: str, folder: RunFolder
    ) -> None:
        self.link = link
        self.world = world
        self.recipe = recipe
        self.config = config
        self.backend = backend
        self.folder = folder
        self.devices = tuple(str(spec) for spec in world.specs)
        origin_s: float = world.exchange_json(time.time(), name="origins")[0]
        self.started_at = datetime.fromtimestamp(origin_s).astimezone().isoformat(timespec="seconds")
        self.commit = commit() if world.rank == 0 else None
        self.recorder = Recorder(world.rank, origin_s=origin_s)
        self.splitter = Splitter(world_size=world.size, shares=recipe.shares, speed_hints=recipe.speed_hints)
        self.history: list[dict[str, Any]] = []
        self.schedules: list[list[Any]] = []
        self.replica: LoopReplica | None = None
        self.num_samples = 0
        self.is_recorded = False
        self._planners: dict[int, Planner] = {}
        self._feeds = Feeds(device=world.device, seed=recipe.seed)
        self._consumed = self._reached = 0
        self._passes = self._evaluations = 0
        self._pass_started_s = self._trained_s = self._train_s = 0.0
        self._first_pass_s: float | None = None
        self._evaluated = Evaluated()
        self._is_complete = True

    # Set-up

    def prepare(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[LRScheduler],
    ) -> None:
        """Make the user's models this rank's replica; all ranks leave with rank 0's parameters."""
        world = self.world
        self.replica = LoopReplica(
            self.recipe,
            models=models,
            optimizers=optimizers,
            schedulers=schedulers,
            device=world.device,
            rank=world.rank,
            name=str(world.spec),
        )
        self.averages = make_averages(self.replica, world, backend=self.backend, verify=self.config.verify)
        self.averages.start_from_rank_zero()
        # Rank 0 draws as a plain loop would; the others need their own dropout.
        if world.rank > 0:
            torch.manual_seed(self.recipe.seed * 1_000_003 + world.rank)

    def _drive(self, feed: Feed) -> None:
        assert self.replica is not None
        self.driver = Driver(
            replica=self.replica,
            feed=feed,
            averages=self.averages,
            throttle=Throttle(self.world.spec.speed),
            recorder=self.recorder,
            stop_requested=lambda: self.loop.is_leaving or self.link.stop_requested.is_set(),
            on_step=lambda: None,
        )
        self.loop = UserLoop(self.driver, self.replica)
        self.books = Books(self.driver, self.replica, self.world)
        self.recorder.event("ready", device=str(self.world.spec), feed=feed.reason)
        self._open_folder()

    def _open_folder(self) -> None:
        if self.world.rank == 0:
            self.folder.create()
            self.folder.write_json("config.json", self._settings())
            write_record(self.folder, self, status="running")
        self.is_recorded = True

    def _settings(self) -> dict[str, Any]:
        options = recipes.settings(self.recipe) | configs.settings(self.config)
        return {
            "schema_version": SCHEMA_VERSION,
            "devices": self.devices,
            "backend": self.backend,
            "options": {name: value for name, value in options.items() if name != "batch_size"},
        }

    # Passes over a data set

    def begin_pass(self, source: Source, epoch: int) -> None:
        """Open the next pass; all ranks meet here."""
        feed = self._feeds.for_training(source)
        check_num_samples(feed.num_samples, world_size=self.world.size)
        self.num_samples = feed.num_samples
        if self._passes == 0:
            self._drive(feed)
        self.driver.feed = feed
        feed.start_epoch(self._order(source, epoch), epoch)
        self.driver.schedule = ScheduleRecorder() if self.config.record_schedule else None
        self._meet(epoch)
        span = Lease(0, feed.num_samples)
        leases = open_leases(self.world, f"ledger/{self._passes}", span, batch_size=source.batch_size)
        self.loop.open(
            self._policy(source.batch_size, span),
            leases=leases,
            epoch_base=self._consumed,
            batch_size=source.batch_size,
        )
        self._passes += 1
        self._reached = self.driver.reached
        self._pass_started_s = time.perf_counter()

    def next_batch(self) -> Any | None:
        data = self.loop.next_batch()
        if data is None:
            self._end_pass()
        return data

    def leave_pass(self) -> None:
        """End a pass that the user left early."""
        if self._passes and self.loop.is_open:
            self.loop.leave()
            self._end_pass()

    def _end_pass(self) -> None:
        self._trained_s += time.perf_counter() - self._pass_started_s
        # A pass that was left early has used only what its averages accounted for, the same on all ranks.
        self._consumed += self.driver.reached - self._reached if self.driver.is_stopped else self.num_samples
        self._is_complete &= not self.driver.is_stopped
        if self.driver.schedule is not None:
            self.schedules.append(self.driver.schedule.entries)

    def _policy(self, batch_size: int, span: Lease) -> Any:
        world = self.world
        if batch_size not in self._planners:
            self._planners[batch_size] = Planner(self.recipe.planner_config(world.size, batch_size=batch_size))
        return open_policy(
            self.recipe.policy,
            Seat(world.rank, world.size, batch_size),
            span,
            planner=self._planners[batch_size],
            splitter=self.splitter,
            max_overshoot=self.recipe.max_overshoot,
        )

    def _order(self, source: Source, epoch: int) -> torch.Tensor:
        if not source.shuffle:
            return in_order(self.num_samples)
        return shuffled(self.num_samples, seed=self.recipe.seed, epoch=epoch)

    def _meet(self, epoch: int) -> None:
        """Time starts when all are here."""
        started_s = time.perf_counter()
        self.world.barrier(f"the start of epoch {epoch}", timeout_s=self.config.timeout_s)
        is_first = self._first_pass_s is None
        self.recorder.wait("startup" if is_first else "epoch boundary", time.perf_counter() - started_s)
        if self._first_pass_s is None:
            self._first_pass_s = time.perf_counter()
        self.recorder.event("epoch start", epoch=epoch)

    # Evaluation

    def evaluate(self, function: EvaluateAll, source: Source) -> float:
        """The mean over the whole data set, computed by this rank alone."""
        started_s = time.perf_counter()
        span = Lease(0, self._evaluation_feed(source).num_samples)
        evaluated = self._evaluate(function, source, LocalLeases(span, batch_size=source.batch_size), share=1.0)
        self._count_evaluation(evaluated, started_s)
        return evaluated.total / evaluated.samples

    def evaluate_together(self, function: EvaluateAll, source: Source) -> float:
        """The same, shared by all ranks; all of them call this, and all get the same number."""
        started_s = time.perf_counter()
        self._evaluations += 1
        span = Lease(0, self._evaluation_feed(source).num_samples)
        leases = open_leases(self.world, f"eval/{self._evaluations}", span, batch_size=source.batch_size)
        mine = self._evaluate(function, source, leases, share=1 / self.world.size)
        parts = self.world.exchange_json([mine.total, mine.samples], name="evaluations")
        self._count_evaluation(mine, started_s)
        total, samples = (sum(part[i] for part in parts) for i in range(2))
        return float(total / samples)

    def _evaluation_feed(self, source: Source) -> Feed:
        feed = self._feeds.for_evaluation(source)
        feed.start_epoch(in_order(feed.num_samples), 0)
        return feed

    @torch.no_grad()
    def _evaluate(self, function: EvaluateAll, source: Source, leases: Leases, *, share: float) -> Evaluated:
        assert self.replica is not None
        feed = self._feeds.for_evaluation(source)
        models = self.replica.models
        # Module by module: a layer that the user froze in evaluation mode stays there.
        were_training = [(module, module.training) for module in self.replica.model.modules()]
        self.replica.model.eval()
        total, samples = 0.0, 0
        try:
            while (lease := leases.take(Take(BATCHES_PER_LEASE * source.batch_size, share=share))) is not None:
                for batch in lease.batches(source.batch_size):
                    value = function(models[0] if len(models) == 1 else models, feed.fetch(batch))
                    total += float(value) * batch.count
                    samples += batch.count
        finally:
            for module, was_training in were_training:
                module.training = was_training
        return Evaluated(total=total, samples=samples)

    def _count_evaluation(self, evaluated: Evaluated, started_s: float) -> None:
        elapsed_s = time.perf_counter() - started_s
        # The last evaluation of an epoch is the one that is told; the time of all is.
        self._evaluated = replace(evaluated, seconds=self._evaluated.seconds + elapsed_s)
        if self._passes:
            self.loop.pause(elapsed_s)

    # The end of an epoch, and of the session

    def conclude_epoch(self, epoch: int) -> EpochMetrics | None:
        """The metrics of all ranks since the last time; None where no pass was made. All ranks call this."""
        if self._trained_s == 0.0:
            return None
        assert self._first_pass_s is not None
        metrics = self.books.close(
            epoch,
            seconds=self._trained_s,
            evaluated=self._evaluated,
            wants_stop=False,
            train_s_before=self._train_s,
            first_s=self._first_pass_s,
            is_complete=self._is_complete,
        )
        self._train_s = metrics.train_s
        self.history.append(as_json(metrics))
        self.books.open()
        self._evaluated, self._trained_s, self._is_complete = Evaluated(), 0.0, True
        if self.world.rank == 0:
            write_record(self.folder, self, status="running")
        return metrics

    def finish(self) -> None:
        """Leave the record and the merged timeline behind; all ranks call this."""
        if not self.is_recorded:
            return
        timelines = self.world.exchange_json(self.recorder.events, name="timelines")
        schedules = self.world.exchange_json(self.schedules, name="schedules") if self.config.record_schedule else None
        if self.world.rank == 0:
            write_timeline(self.folder, timelines)
            if schedules is not None:
                write_schedule(self.folder, schedules)
            write_record(self.folder, self, status="finished")

    def close(self) -> None:
        """Let go of the user's objects and of what runs beside the rank."""
        if self.replica is not None:
            self.replica.release()
            self.averages.close()
        self._feeds.close()


def new_run_dir(policy: str) -> Path:
    """Where a session that was given no folder leaves its record: a name, not yet a folder."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path.cwd() / "runs" / f"{stamp}-{policy}-loop"
