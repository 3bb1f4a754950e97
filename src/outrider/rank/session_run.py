"""Runs the passes of a session on one rank; the user's loop executes the steps.

Decides the order of collective work in a user's loop: passes, evaluations, the end of an epoch. `RankLife` provides
what `train()` needs as well: set-up, checkpoints, records. `Session` decides when the user may call what.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from outrider.data import randomness
from outrider.data.epoch_pass import EpochPass
from outrider.data.feed import Feed
from outrider.data.order import in_order, num_kept, shuffled
from outrider.data.pass_state import PassState
from outrider.errors import ConfigError
from outrider.launch.script_launcher import lock_unless_starter_does
from outrider.policy.effects import Lease
from outrider.policy.remaining import Remaining
from outrider.rank.agreement import compare, pass_to_compare, steps_to_compare, stream_to_compare
from outrider.rank.loop_place import LoopPlace
from outrider.rank.pass_feeds import PassFeeds
from outrider.rank.rank_life import RankLife, RunSetting, check_num_samples
from outrider.rank.session_evaluation import SessionEvaluation
from outrider.rank.session_feeds import Feeds, Source
from outrider.rank.shared_evaluation import EvaluateAll, EvaluationSums
from outrider.rank.training_length import Goal, progress, samples_after
from outrider.rank.user_loop import UserLoop
from outrider.record import checkpoint
from outrider.record import run_config as configs
from outrider.record.epoch_metrics import EpochMetrics, from_json
from outrider.record.resume import Resumed
from outrider.record.run_config import RunConfig
from outrider.record.run_folder import SCHEMA_VERSION, RunFolder
from outrider.record.run_folder_lock import FolderLock
from outrider.record.run_record import gpu_uuid
from outrider.replica import recipe as recipes
from outrider.replica import state_transfer
from outrider.replica.learning_words import joined_words, learning_words
from outrider.replica.loop_replica import LoopReplica
from outrider.replica.recipe import LoopRecipe
from outrider.replica.schedule_ticks import TickPer
from outrider.world.environment import is_trial
from outrider.world.messages import Link
from outrider.world.world import World, agree_on_interruption

MAIN_RANK = 0
# A loop of the user's own, `for epoch in range(n)`, may ask for its remaining passes after rank 0 has left it.
MOST_REFUSED = 100_000


class SessionRun:
    """From the user's models to the last record, on one rank."""

    def __init__(
        self, link: Link, world: World, recipe: LoopRecipe, config: RunConfig, *, backend: str, folder: RunFolder
    ) -> None:
        setting = RunSetting(
            folder=folder.path,
            origin_s=world.exchange_json(time.time(), name="origins")[0],
            backend=backend,
            devices=tuple(str(spec) for spec in world.specs),
            is_trial=is_trial(),
        )
        # Only rank 0 may train alone, as it prints, evaluates and saves; for good, as loops of other ranks lag behind.
        may_rest = recipe.policy_spec.switches
        self._life = RankLife(
            link, recipe, config, world=world, setting=setting, may_rest=may_rest, only_alone=MAIN_RANK
        )
        self.link, self.world, self.recipe, self.config = link, world, recipe, config
        self.folder, self.devices, self.recorder = self._life.folder, self._life.devices, self._life.recorder
        self.replica: LoopReplica | None = None
        self.is_recorded = False
        self.interrupted_by: signal.Signals | None = None
        """The signal that ends the session, once all ranks know of it."""
        self.first_epoch = 0
        """Earlier epochs are in the checkpoint from which this run continues."""
        self.goal: Goal | None = None
        self.is_counting = False
        """Whether a loop over epochs is running."""
        self.on_meeting: Callable[[], None] | None = None
        """Called on all ranks at a pause, instead of a checkpoint: for frameworks that save their own."""
        self.wants_meeting = False
        self._lock: FolderLock | None = None
        self._feeds = Feeds(device=world.device, seed=recipe.seed)
        self._pass_feeds = PassFeeds(world, self._feeds, policy=recipe.policy_spec, seed=recipe.seed)
        self.place = LoopPlace(world, seed=recipe.seed)
        self._evaluation = SessionEvaluation(world, self._feeds, on_evaluated=self._count_evaluation)
        self._evaluated = EvaluationSums()
        self._rhythm: list[tuple[int, int]] = []
        """The batch sizes of the loop, each with the sample of the world at which it starts."""
        self._random: dict[str, Any] | None = None
        """The random state of the checkpoint, until it is restored."""
        self._consumed = 0
        """Samples of the whole world in passes that have ended."""
        self._pass_samples = self._epoch_began = self._counted = 0
        self._passes = 0
        self._passes_in_epoch = self._samples_in_epoch = 0
        """Complete passes of the epoch, and their samples."""
        self._passes_to_skip = 0
        """Passes of the first epoch that were complete before the checkpoint."""
        self._pass: EpochPass | None = None
        self._reached_before = 0
        self._before: checkpoint.Progress | None = None
        """The mid-pass checkpoint from which the next pass continues."""
        self._sequence_before: str | None = None
        """Digest of the user's own sequence of samples in the pass of the checkpoint."""
        self._trained_s = 0.0
        self._on_warning: Callable[[str], None] = lambda text: None
        self._is_complete = True
        self._has_rested = self._shares_always = self._has_checked_state = False
        self._rests_before = self._num_refused = 0
        self.metrics: EpochMetrics | None = None
        """Metrics of the newest epoch with a finished pass; equal on all ranks, except for the evaluation."""

    def tell_choices(self, tell: Callable[[str, str], None]) -> None:
        """Call `tell` on rank 0 with each choice of the policy `auto` and its reason."""
        self._life.on_choice = lambda decision: tell(decision.value, decision.reason)

    def tell_warnings(self, tell: Callable[[str], None]) -> None:
        """Call `tell` on rank 0 with warnings about the loop."""
        self._on_warning = tell

    def tell_new_running_mean(self) -> None:
        """Tell the user that a resumed run begins a running mean anew, which no checkpoint holds."""
        if self._life.resumed_from is not None:
            self._warn(
                "the running mean (EMA) begins anew: checkpoints do not hold it; save ema.state_dict() yourself and "
                "load it after a resume"
            )

    def share_always(self) -> None:
        """Let all ranks run the loop for every batch of shared steps; called before the first one, on all ranks."""
        self._shares_always = True
        self._life.splitter.share_always()

    @property
    def has_rested(self) -> bool:
        """Whether ranks rested in the current or last pass, while rank 0 trained alone; the same on all ranks."""
        return self._has_rested if self._pass is None else self._life.driver.num_rests > self._rests_before

    def _warn(self, text: str) -> None:
        if self.world.rank == 0:
            self._on_warning(text)

    @property
    def history(self) -> list[dict[str, Any]]:
        """Metrics of finished epochs."""
        return self._life.history

    # Set-up

    def prepare(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[LRScheduler],
        scaler: GradScaler | None = None,
        per: TickPer = "optimizer-step",
    ) -> None:
        """Make the user's models this rank's replica; afterwards all ranks have rank 0's parameters."""
        life, world = self._life, self.world
        if world.rank == 0:
            checkpoint.refuse_strangers(self.folder, resume=self.config.resume)
        replica = self.replica = LoopReplica(
            self.recipe,
            models=models,
            optimizers=optimizers,
            schedulers=schedulers,
            device=world.device,
            rank=world.rank,
            name=str(world.spec),
            scaler=scaler,
            per=per,
        )
        life.adopt(
            replica,
            may_lag=False,
            stop_requested=lambda: self.loop.is_leaving,
            pause_due=lambda: life.clock.is_due() or self.link.wants_stop or self.wants_meeting,
            samples_seen=lambda: self.samples_seen,
            steps_at=lambda samples: replica.counts.steps.at(samples),
        )
        self.loop = UserLoop(life.driver, replica, num_ranks=world.size, warn=self._warn)
        resumed = life.resume(replica.identity())
        if resumed is not None:
            self._go_back(replica, resumed)
        randomness.seed_rank(self.recipe.seed, world.rank)

    def _open_folder(self, feed: Feed) -> None:
        self._life.recorder.event(
            "ready", device=str(self.world.spec), gpu=gpu_uuid(self.world.device), feed=feed.reason
        )
        if self.world.rank == 0:
            self._lock = lock_unless_starter_does(self.folder)
        self._life.begin_record()
        if self.world.rank == 0:
            self.folder.write_json("config.json", self._settings())
        self._life.events.open()
        self.is_recorded = True

    def _settings(self) -> dict[str, Any]:
        options = recipes.settings(self.recipe) | configs.settings(self.config)
        return {
            "schema_version": SCHEMA_VERSION,
            "devices": self.devices,
            "backend": self._life.backend,
            "options": options | self._life.loop_options,
            # Read by `outrider advise`, which otherwise expects that ranks may rest.
            **({"shares_always": True} if self._shares_always else {}),
        }

    def _describe_loop(self, batch_size: int) -> None:
        """Record what `train()` has as options: batch size and length; several batch sizes become a list."""
        sizes = list(dict.fromkeys([*(size for size, _ in self._rhythm), batch_size]))
        length = {} if self.goal is None else {name: n for name, n in asdict(self.goal).items() if n is not None}
        batching = self._pass_feeds.batching
        self._life.loop_options = {"batch_size": sizes[0] if len(sizes) == 1 else sizes, **length, **batching}

    # Passes over a data set

    def begin_pass(self, source: Source, epoch: int, state: PassState | None = None) -> int:
        """Open the next pass, or continue the pass of the user's `state`; all ranks meet here.

        Returns the epoch of its order.
        """
        state = self.place.agree(state, epoch, is_counting=self.is_counting)
        epoch = epoch if state is None else state.epoch
        feed = self._pass_feeds.open(source, epoch, before=self._sequence_before if self._before else None)
        check_num_samples(feed.num_samples, world_size=self.world.size)
        self._life.num_samples = feed.num_samples
        self._describe_loop(source.batch_size)
        if self._passes == 0:
            self._open_folder(feed)
        kept = self._kept(source, feed.num_samples)
        left = self._left(source)
        order = self.place.name_order(source, self._pass_feeds.digest)
        self._pass_samples = kept if left is None else min(kept, left)
        self._pass = EpochPass(
            epoch=epoch,
            batch_size=source.batch_size,
            feed=feed,
            order=self._order(source, epoch),
            remaining=self._rest_of_pass(kept)
            if state is None
            else state.rest(feed.num_samples, kept=kept, order=order),
            stop=self._pass_samples,
            seen=self._consumed,
            samples_after=samples_after(
                self.goal if self.is_counting else None,
                left=left,
                epochs_done=self._counted,
                pass_samples=self._pass_samples,
            ),
        )
        self._reached_before = self._life.driver.reached
        self._rests_before = self._life.driver.num_rests
        self._draw_on()
        if not self._rhythm or self._rhythm[-1][0] != source.batch_size:
            self._rhythm.append((source.batch_size, self._consumed))
        self._open_counts(epoch)
        self._meet(self._pass, pass_to_compare(source, num_samples=feed.num_samples, goal=self.goal))
        self._passes += 1
        self.loop.unit = self.recipe.step_samples(self.world.size, batch_size=source.batch_size)
        self.loop.open(self._life.next_segment(self._pass))
        return epoch

    def _open_counts(self, epoch: int) -> None:
        assert self.replica is not None
        self.replica.begin_epoch(epoch)
        self.replica.counts.per_step.open_pass()

    def num_steps(self, source: Source) -> int:
        """Steps of the next pass as one device would take them, the same on every rank."""
        num_samples = self._pass_feeds.num_positions(source, self._counted)
        kept, left = self._kept(source, num_samples), self._left(source)
        return -(-(kept if left is None else min(kept, left)) // source.batch_size)

    def skips_pass(self) -> bool:
        """Whether the next pass was complete before the checkpoint from which the session continues."""
        skips = self._passes_to_skip > 0
        self._passes_to_skip -= skips
        self._passes_in_epoch += skips
        return skips

    def _rest_of_pass(self, num_samples: int) -> Remaining:
        before, self._before = self._before, None
        return Remaining.whole(num_samples) if before is None else before.rest(num_samples)

    def next_batch(self) -> Any | None:
        """The next batch; None at the end of the pass, on all ranks alike."""
        assert self._pass is not None
        driver = self._life.driver
        if not self._has_checked_state:
            self._check_state()
        while (data := self.loop.next_batch()) is None:
            goes_on = driver.is_paused or driver.is_cut
            if goes_on:
                self._pass.end_segment(self._life.left_of_segment())
            if not goes_on or not self._pass.left:
                self._end_pass()
                return None
            if driver.is_paused:
                self._pause()
            if self.interrupted_by is not None:
                return None
            self.loop.open(self._life.next_segment(self._pass))
        return data

    def _check_state(self) -> None:
        """Let all ranks share steps if others could not take over the optimizers' state from one that trains alone.

        Once, after the first step, which all ranks have shared unless rank 0 began alone.
        """
        assert self.replica is not None
        if not self.replica.steps:
            return
        self._has_checked_state = True
        splitter = self._life.splitter
        if not splitter.may_rest or splitter.lone is not None:
            return
        try:
            state_transfer.refuse_immovable(self.replica)
        except ConfigError as error:
            splitter.share_always()
            self._warn(f"{error.message}: so no rank trains alone, and all share every step")

    def _pause(self) -> None:
        """Save a checkpoint in mid-pass, and agree whether a signal asked for it; all ranks call this."""
        assert self._pass is not None
        self._life.driver.settle(is_within_pass=True)
        accounting = self._life.accounting
        accounting.tell(seconds=self._trained_s + self._pass.seconds, wants_stop=self.link.wants_stop)
        self._meet_or_save(self._pass.epoch, is_last=accounting.wants_stop)
        self._agree_on_interruption()

    def _meet_or_save(self, epoch: int, *, is_last: bool) -> None:
        self.wants_meeting = False
        if self.on_meeting is None:
            self._save(epoch, is_last=is_last)
            return
        started_s = time.perf_counter()
        self.on_meeting()
        if self._pass is not None:
            # The time of an evaluation or of writing files is not training time.
            self._pass.leave_out(time.perf_counter() - started_s)

    @property
    def wants_stop(self) -> bool:
        """Whether a signal ends the loop after the current meeting; the same on all ranks."""
        return self._life.accounting.wants_stop

    @property
    def position(self) -> int | None:
        """Samples of the current pass that its segments have used; None between two passes."""
        return None if self._pass is None else self._pass.remaining.position

    def remaining_after(self, done: int) -> list[list[int]] | None:
        """The ranges that follow the first `done` samples of the current pass; None between two passes."""
        if self._pass is None:
            return None
        remaining = self._pass.remaining
        return remaining.after([Lease(done, remaining.end - done)]).state()

    def leave_out(self, seconds: float) -> None:
        """Exclude this time of the current batch from training time."""
        self.loop.pause(seconds)
        if self._pass is not None:
            self._pass.leave_out(seconds)

    def _agree_on_interruption(self) -> None:
        if self._life.accounting.wants_stop:
            self.interrupted_by = agree_on_interruption(self.link, self.world)

    def leave_pass(self) -> None:
        """End a pass that the user left early."""
        if self._passes and self.loop.is_open:
            self.loop.leave()
            self._end_pass()

    def _end_pass(self) -> None:
        assert self._pass is not None
        self.loop.end_pass()
        self._trained_s += self._pass.seconds
        driver = self._life.driver
        self._has_rested = driver.num_rests > self._rests_before
        # A pass that the user left early has used only the samples that its averages accounted for, on all ranks alike.
        accounted = self._pass.began_at + driver.reached - self._reached_before
        used = accounted if driver.is_stopped else self._pass_samples
        driver.settle(is_within_pass=False)
        if driver.is_stopped:
            self._make_followers_equal()
        self.place.end_pass(self._pass, self.loop, driver)
        self._consumed += used
        self._samples_in_epoch += used
        self._is_complete &= not driver.is_stopped
        # The ranks have just met in the last average of the pass, so this exchange waits only briefly.
        evaluated = self.metrics.eval if self.metrics is not None and self._passes_in_epoch else None
        told = self._life.metrics_so_far(
            self._pass.epoch, seconds=self._trained_s, is_complete=self._is_complete, wants_stop=self.link.wants_stop
        )
        self.metrics = replace(told, eval=evaluated, eval_s=self._evaluated.seconds)
        self._pass = None
        self._passes_in_epoch += 1

    def _make_followers_equal(self) -> None:
        """Copy the state of a rank that stayed in the loop to the ranks that left it; all ranks call this.

        Ranks that left took the last shared steps without the user's changes to gradients, such as clipping. Their code
        after the loop has already run and may have changed settings, which stay.
        """
        assert self.replica is not None
        followed = self.world.exchange_json(self.loop.has_followed, name="ranks that left the loop")
        if True in followed and False in followed:
            self._life.driver.averages.hand_over(followed.index(False), at=self.replica.at)

    def interrupt(self) -> None:
        """Write the record before a signal is raised in the user's loop; all ranks call this."""
        self.finish(status="interrupted")

    def _order(self, source: Source, epoch: int) -> torch.Tensor:
        if not source.shuffle or source.sequence is not None:
            return in_order(self._life.num_samples)
        seed = self.recipe.seed if source.order_seed is None else source.order_seed
        return shuffled(self._life.num_samples, seed=seed, epoch=epoch)

    def _kept(self, source: Source, num_samples: int) -> int:
        """Samples of a pass, without those dropped by `drop_last`."""
        unit = self.recipe.step_samples(self.world.size, batch_size=source.batch_size)
        return num_kept(num_samples, drop_last=source.drop_last, unit=unit)

    def _left(self, source: Source) -> int | None:
        if self.goal is None or not self.is_counting or self.replica is None:
            return None
        return self.goal.left(self._consumed, batch_size=source.batch_size, replica=self.replica)

    def pass_state(self) -> PassState:
        """The place in the current pass up to which this rank's model has learned; between passes, that of the last."""
        if self._pass is None:
            return self.place.ended
        return self.place.state_of(self._pass, self.place.rest_now(self._pass, self.loop, self._life.driver))

    def state(self) -> dict[str, Any]:
        """The place in the whole loop, for the user's own checkpoint."""
        assert self.replica is not None
        rest = None if self._pass is None else self.pass_state()
        is_within = rest is not None and rest.remaining is not None
        # A pass whose last batch the user holds counts as complete.
        ended = self._pass_samples if rest is not None and not is_within else 0
        return {
            "schema_version": SCHEMA_VERSION,
            "epoch": self._counted if self._pass is None else self._pass.epoch,
            "passes": self._passes_in_epoch + (rest is not None and not is_within),
            "consumed": self._consumed + ended,
            "samples_in_epoch": self._samples_in_epoch + ended,
            "rhythm": [list(pair) for pair in self._rhythm],
            "counts": self.replica.counts.state(),
            "ticks": self.replica.ticks,
            "feed": rest.as_dict() if rest is not None and is_within else None,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue at the place of rank 0's state in the user's checkpoint; all ranks call this."""
        assert self.replica is not None
        told = self.world.exchange_json(dict(state), name="states of sessions")[0]
        self._take_place(self.replica, told)
        self.replica.go_on_from(told["ticks"])
        self.first_epoch, self._passes_to_skip = told["epoch"], told["passes"]
        self.place.loaded = None if told["feed"] is None else PassState.from_dict(told["feed"])

    # Progress of the loop

    @property
    def samples_seen(self) -> int:
        """Samples of the whole world; between averages, this rank's estimate."""
        if self.replica is not None and self._passes and self.loop.is_inside:
            return self.replica.at
        return self._consumed

    def has_ended(self, epoch: int) -> bool:
        """Whether the loop over epochs ends before this one; the same on all ranks."""
        assert self.goal is not None
        self.goal.refuse_standstill(epoch - self.first_epoch, samples=self._consumed - self._epoch_began)
        self._epoch_began, self._counted = self._consumed, epoch
        if self.replica is not None:
            self.replica.begin_epoch(epoch)
        return self.goal.is_reached(epochs=epoch, samples=self._consumed, replica=self.replica)

    def goes_on(self, what: str) -> bool:
        """Whether the loop comes to `what`, a pass or its end; once ranks rest for good, rank 0's loop decides.

        A flag that the user sets in the body before a `break` is set on rank 0 only.
        """
        if not self._life.splitter.stays_alone:
            return True
        if self.world.rank == MAIN_RANK:
            self.world.lead(what)
            return True
        goes_on = self.world.follow(what)
        self._num_refused = 0 if goes_on else self._num_refused + 1
        if self._num_refused > MOST_REFUSED:
            raise ConfigError(
                f"rank 0 has left its loops, but rank {self.world.rank} asked for more than {MOST_REFUSED} "
                "further passes",
                hint="rank 0 trained alone, so counters of your own stand still on other ranks: let s.global_step end "
                "the loop, or use s.epochs(steps=...)",
            )
        return goes_on

    def leave_loops(self) -> None:
        """Rank 0 has left its loops: other ranks that wait for their next epoch or pass leave theirs, too."""
        if self._life.splitter.stays_alone and self.world.rank == MAIN_RANK:
            self.world.lead("the end of the loops")

    def is_over(self, source: Source) -> bool:
        """Whether the loop has used all its samples."""
        return self._left(source) == 0

    def progress(self, epoch: int | None) -> float:
        """The finished part of the loop over epochs, from 0 to 1."""
        part = (self.samples_seen - self._epoch_began) / self._pass_samples if self._pass_samples else 0.0
        epochs = self._counted if epoch is None else epoch + min(1.0, part)
        return progress(self.goal, epochs=epochs, samples=self.samples_seen, replica=self.replica)

    def how_far(self, epoch: int | None) -> tuple[str, float]:
        """The place in the loop in words, and the finished part from 0 to 1; without `epochs()`, that of this pass."""
        if self.goal is None or not self.is_counting or epoch is None:
            return f"pass {self._passes}", min(1.0, (self.samples_seen - self._consumed) / self._pass_samples)
        total = "" if self.goal.epochs is None else f"/{self.goal.epochs}"
        return f"epoch {epoch + 1}{total}", self.progress(epoch)

    def mean_loss(self) -> float | None:
        """The mean loss of this rank's batches in this epoch; None on a GPU, because reading it would wait."""
        assert self.replica is not None
        return self.replica.loss_sums.mean_so_far() if self.world.device.type == "cpu" else None

    @property
    def learning_words(self) -> str | None:
        """What the session changes about learning, and its need for memory if that is large."""
        assert self.replica is not None
        learning = learning_words(self.replica.compensation, lr_scale=self.recipe.lr_scale)
        return joined_words(learning, self._life.memory_words)

    def _meet(self, current: EpochPass, options: dict[str, Any]) -> None:
        """Start the time once all ranks have arrived; their `options` of this pass must be equal."""
        assert self.replica is not None
        started_s = time.perf_counter()
        what = f"the start of epoch {current.epoch}"
        told = {**options, **steps_to_compare(self.replica), **stream_to_compare(current.feed)}
        everyone = self.world.exchange_json([told, self.replica.counts.state()], name="passes", what=what)
        compare(self.world, [options for options, _ in everyone])
        # Ranks may see the number of batches per step at different places, or not yet: all adopt the first known count.
        self.replica.counts.restore(next((c for _, c in everyone if c["per_step"]), self.replica.counts.state()))
        self._life.start_clock(current.epoch, waited_s=time.perf_counter() - started_s)
        current.restart_time()

    # Evaluation

    def evaluate(self, function: EvaluateAll, source: Source) -> float:
        """The mean of `function` over the whole data set, computed by this rank alone."""
        assert self.replica is not None
        with self.recorder.activity.during("evaluation"):
            value = self._evaluation.alone(function, source, self.replica.models)
        return self._evaluated_to(value)

    def evaluate_together(self, function: EvaluateAll, source: Source) -> float:
        """The mean of `function` over the data set, divided among all ranks; all call this and get the same number."""
        assert self.replica is not None
        with self.recorder.activity.during("evaluation"):
            value = self._evaluation.together(function, source, self.replica.models)
        return self._evaluated_to(value)

    def _evaluated_to(self, value: float) -> float:
        """Add the evaluation to the metrics right after the pass, not only at the end of the epoch."""
        if self.metrics is not None and self._passes_in_epoch:
            self.metrics = replace(self.metrics, eval=value, eval_s=self._evaluated.seconds)
        return value

    def _count_evaluation(self, evaluated: EvaluationSums) -> None:
        # Metrics report the last evaluation of an epoch, but the time of all of them.
        self._evaluated = replace(evaluated, seconds=self._evaluated.seconds + evaluated.seconds)
        if self._passes:
            self.loop.pause(evaluated.seconds)

    # The end of an epoch, and of the session

    def conclude_epoch(self, epoch: int) -> None:
        """Merge the metrics of all ranks since the last call, if there was a pass. All ranks call this."""
        if self._trained_s == 0.0:
            return
        life = self._life
        self.metrics = life.conclude(
            epoch, seconds=self._trained_s, evaluated=self._evaluated, is_complete=self._is_complete
        )
        assert self.replica is not None
        self.replica.begin_epoch(self.replica.counts.epoch + 1)
        life.accounting.open()
        self._evaluated, self._trained_s, self._is_complete = EvaluationSums(), 0.0, True
        self._passes_in_epoch = self._samples_in_epoch = 0
        wants_stop = life.accounting.wants_stop
        if life.is_checkpoint_due(epoch + 1) or wants_stop:
            self._meet_or_save(epoch + 1, is_last=wants_stop)
        life.log_epoch()
        self._agree_on_interruption()

    def await_checkpoint(self) -> None:
        """Wait until the newest checkpoint of this rank is written."""
        self._life.await_checkpoint()

    def finish(self, *, status: str = "finished") -> None:
        """Write the record and the merged timeline; all ranks call this."""
        # A run resumed at its very end makes no pass, but finishes only now.
        if not self.is_recorded and not (self.first_epoch and self.goal is not None):
            return
        if self.goal is None:
            # Without epochs() every pass is an epoch.
            self._life.loop_options["epochs"] = len(self.history)
        self._life.finish(status=lambda: status)

    # Resuming from a checkpoint

    def begin_count(self, goal: Goal) -> int:
        """The first epoch of a loop: the one after the checkpoint if the run was resumed."""
        keeps_place = self.config.resume is not None or self.config.checkpoint_every is not None
        if keeps_place and self.goal is not None:
            raise ConfigError(
                "epochs() was called before, and a checkpoint keeps the place in one loop over epochs",
                hint="make it one loop, or leave checkpoint_every and resume out",
            )
        if goal.epochs is not None and self.first_epoch > goal.epochs:
            raise ConfigError(
                f"epochs({goal.epochs}) ends before the checkpoint, which stands at epoch {self.first_epoch}",
                hint=f"pass {self.first_epoch} or more, or leave resume out to begin anew",
            )
        self.goal, self._epoch_began, self.is_counting = goal, self._consumed, True
        self._draw_on()
        return self.first_epoch

    def _draw_on(self) -> None:
        """Restore the random state only now: numbers that the user drew before do not belong to the run."""
        if self._random is not None:
            randomness.restore_saved(self.world.device, self._random)
            self._random = None

    def _save(self, epoch: int, *, is_last: bool) -> None:
        """Save a checkpoint between two epochs or in mid-pass; all ranks call this."""
        assert self.replica is not None
        rest = None if self._pass is None else self._pass.remaining
        self._life.save(
            epoch,
            position=self._samples_in_epoch + (0 if rest is None else rest.position),
            remaining=rest,
            is_mid_epoch=rest is not None,
            passes=self._passes_in_epoch,
            identity=self.replica.identity(),
            rank_state={
                "consumed": self._consumed,
                "rhythm": self._rhythm,
                "num_samples": self._life.num_samples,
                "samples_in_epoch": self._samples_in_epoch,
                "sequence": self._pass_feeds.digest,
            },
            is_last=is_last,
        )

    def _go_back(self, replica: LoopReplica, resumed: Resumed) -> None:
        """Return to the place of the checkpoint in the user's loop."""
        progress, state = resumed.progress, resumed.state
        self._random, self._life.num_samples = state["random"], state["num_samples"]
        self._take_place(replica, state)
        self.first_epoch = progress.epoch
        self._passes_to_skip = progress.passes
        self._before = progress if progress.remaining is not None else None
        self._sequence_before = state.get("sequence")
        if self.history:
            self.metrics = from_json(self.history[-1])

    def _take_place(self, replica: LoopReplica, state: Mapping[str, Any]) -> None:
        self._consumed, self._samples_in_epoch = state["consumed"], state["samples_in_epoch"]
        self._rhythm = [(batch_size, since) for batch_size, since in state["rhythm"]]
        for batch_size, since in self._rhythm:
            replica.counts.open_pass(batch_size, since=since)
        # Older checkpoints lack counts: their schedules ticked once per batch.
        if "counts" in state:
            replica.counts.restore(state["counts"])

    def go_on_from(self, epoch: int, *, samples_before: int, remaining: list[list[int]] | None) -> None:
        """Begin in the epoch of a framework's own checkpoint; all ranks call this, before the loop.

        `samples_before` counts the samples of earlier epochs. `remaining` holds the unused ranges of the epoch's order.
        """
        self.first_epoch, self._consumed = epoch, samples_before
        if remaining is not None:
            self._before = checkpoint.Progress.of_foreign(epoch, remaining=remaining)

    def close(self) -> None:
        """Release the user's objects, and stop what runs in the background."""
        self._life.close()
        if self.replica is not None:
            self.replica.release()
        self._feeds.close()
        if self._lock is not None:
            self._lock.release()
