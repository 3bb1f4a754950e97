"""One rank's part of a session: the user's models, passes over data sets, evaluations, metrics and the record.

Decides the order of things that all ranks do together. What the user may call when is the session's business in the
front door; batches and steps are the user loop's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from outrider.core.effects import Lease, Seat
from outrider.core.planner import Planner
from outrider.core.policies import open_policy
from outrider.core.schedule import ScheduleRecorder
from outrider.core.split import Splitter
from outrider.data.feed import Feed
from outrider.data.leases import Leases, LocalLeases
from outrider.data.order import in_order, shuffled
from outrider.errors import ConfigError
from outrider.replica import recipe as recipes
from outrider.replica.loop_replica import LoopReplica
from outrider.replica.randomness import restore_random
from outrider.replica.recipe import Recipe
from outrider.runtime import checkpoint
from outrider.runtime import config as configs
from outrider.runtime.averages import make_averages
from outrider.runtime.books import Books, open_leases
from outrider.runtime.config import RunConfig
from outrider.runtime.driver import Driver
from outrider.runtime.evaluation import EvaluateAll, Evaluated, evaluate_all
from outrider.runtime.feeds import Feeds, Source
from outrider.runtime.folder import SCHEMA_VERSION, RunFolder, load_into
from outrider.runtime.messages import Link
from outrider.runtime.metrics import EpochMetrics, as_json
from outrider.runtime.rank import check_num_samples
from outrider.runtime.record import commit, write_record, write_schedule, write_timeline
from outrider.runtime.throttle import Throttle
from outrider.runtime.user_loop import UserLoop
from outrider.runtime.world import World
from outrider.timeline.recorder import Recorder


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
        self.first_epoch = 0
        """Those before it are in the checkpoint that this run goes on from."""
        self._has_counted = False
        self._windows = 0
        self._rhythm: list[tuple[int, int]] = []
        """The batch sizes that schedules ticked by, each with the world's samples from which on."""
        self._rank_state: dict[str, Any] | None = None
        """As the checkpoint has it, until random numbers go on."""
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
        if world.rank == 0:
            checkpoint.refuse_strangers(self.folder, resume=self.config.resume)
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
        average_state = self._resume(checkpoint.find(self.config.resume)) if self.config.resume else None
        self.averages.start_from_rank_zero()
        self.averages.restore(average_state)
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
        self.driver.windows = self._windows
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
        self._draw_on()
        if not self._rhythm or self._rhythm[-1][0] != source.batch_size:
            self._rhythm.append((source.batch_size, self._consumed))
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
        return open_policy(
            self.recipe.policy,
            Seat(world.rank, world.size, batch_size),
            span,
            planner=self._planner(batch_size),
            splitter=self.splitter,
            max_overshoot=self.recipe.max_overshoot,
        )

    def _planner(self, batch_size: int) -> Planner:
        if batch_size not in self._planners:
            self._planners[batch_size] = Planner(self.recipe.planner_config(self.world.size, batch_size=batch_size))
        return self._planners[batch_size]

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
            before_s = self.history[-1]["wall_s"] if self.history else 0.0
            self._first_pass_s = time.perf_counter() - before_s
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

    def _evaluate(self, function: EvaluateAll, source: Source, leases: Leases, *, share: float) -> Evaluated:
        assert self.replica is not None
        feed = self._feeds.for_evaluation(source)
        return evaluate_all(function, self.replica.models, feed, leases, batch_size=source.batch_size, share=share)

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
        every = self.config.checkpoint_every
        if every is not None and (epoch + 1) % round(every) == 0:
            self._save_checkpoint(epoch + 1)
        if self.world.rank == 0:
            write_record(self.folder, self, status="running")
        return metrics

    def finish(self) -> None:
        """Leave the record and the merged timeline behind; all ranks call this."""
        # A run that goes on from its very end makes no pass, but comes to its end only now.
        if not self.is_recorded and not (self.first_epoch and self._has_counted):
            return
        timelines = self.world.exchange_json(self.recorder.events, name="timelines")
        schedules = self.world.exchange_json(self.schedules, name="schedules") if self.config.record_schedule else None
        if self.world.rank == 0:
            write_timeline(self.folder, timelines)
            if schedules is not None:
                write_schedule(self.folder, schedules)
            write_record(self.folder, self, status="finished")

    # Going on from a checkpoint

    def begin_count(self, count: int) -> int:
        """The first of so many epochs: the one after the checkpoint, where the run goes on from one."""
        keeps_place = self.config.resume is not None or self.config.checkpoint_every is not None
        if keeps_place and self._has_counted:
            raise ConfigError(
                "epochs() was called before, and a checkpoint keeps the place in one loop over epochs",
                hint="make it one loop, or leave checkpoint_every and resume out",
            )
        if self.first_epoch > count:
            raise ConfigError(
                f"epochs({count}) ends before the checkpoint, which stands at epoch {self.first_epoch}",
                hint=f"pass {self.first_epoch} or more, or leave resume out to begin anew",
            )
        self._has_counted = True
        self._draw_on()
        return self.first_epoch

    def _draw_on(self) -> None:
        """Random numbers go on only now: what the user drew to get here is no part of the run."""
        if self._rank_state is not None:
            restore_random(self.world.device, self._rank_state)
            self._rank_state = None

    def _save_checkpoint(self, epoch: int) -> None:
        """All ranks call this, between two epochs."""
        assert self.replica is not None
        progress = checkpoint.Progress(
            epoch=epoch,
            position=0,
            windows=self.driver.windows,
            train_s=self._train_s,
            planner={str(batch_size): planner.state() for batch_size, planner in self._planners.items()},
            splitter=self.splitter.state(),
            epochs=self.history,
            identity=checkpoint.loop_identity(self.replica),
        )
        state = checkpoint.loop_state(self.replica) | {
            "average": self.averages.state(),
            "consumed": self._consumed,
            "rhythm": self._rhythm,
            "num_samples": self.num_samples,
        }
        checkpoint.save(
            self.folder, progress, rank=self.world.rank, model=self.replica.model.state_dict(), rank_state=state
        )
        self.world.barrier("all ranks' parts of a checkpoint", timeout_s=self.config.timeout_s)
        if self.world.rank == 0:
            path = checkpoint.commit(self.folder, progress)
            self.recorder.event("checkpoint", epoch=epoch, position=0, path=path.name)

    def _resume(self, path: Path) -> dict[str, Any] | None:
        """Go back to where the checkpoint was taken; returns what the averages need once they have begun."""
        assert self.replica is not None
        progress = checkpoint.load_progress(path, identity=checkpoint.loop_identity(self.replica))
        load_into(self.replica.model, path / "model.safetensors")
        state = self._rank_state = checkpoint.load_rank(path, self.world.rank)
        checkpoint.restore_loop(self.replica, state)
        self._consumed, self._rhythm, self.num_samples = state["consumed"], state["rhythm"], state["num_samples"]
        for batch_size, since in self._rhythm:
            self.replica.tick_every(batch_size, since=since)
        if len(progress.splitter["models"]) == self.world.size:
            self.splitter.restore(progress.splitter)
            for key, planner in progress.planner.items():
                self._planner(int(key)).restore(planner)
        self._windows, self._train_s = progress.windows, progress.train_s
        self.first_epoch, self.history = progress.epoch, list(progress.epochs)
        if self.world.rank == 0:
            self.recorder.event("resume", epoch=progress.epoch, position=0, path=path.name)
        average_state: dict[str, Any] | None = state["average"]
        return average_state

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
