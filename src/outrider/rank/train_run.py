"""The epochs of `train()` on one rank: steps of the replica, then evaluation, callbacks, checkpoints.

Decides the order within an epoch of `train()`. `RankLife` provides what sessions need as well: averages, checkpoints,
records.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from outrider.data.augmented_feed import AugmentFunction
from outrider.data.epoch_orders import EpochOrders
from outrider.data.epoch_pass import EpochPass
from outrider.data.feed import Feed, make_evaluation_feed, make_feed
from outrider.data.loading import LoadedEvaluation
from outrider.errors import DeviceError, named
from outrider.policy.effects import Decision
from outrider.policy.remaining import Remaining
from outrider.rank.agreement import check_data, compare, stream_to_compare
from outrider.rank.device_clock import DeviceClocks
from outrider.rank.epoch_accounting import open_leases
from outrider.rank.epoch_context import EpochContext
from outrider.rank.epoch_end import EpochEnd
from outrider.rank.pass_feeds import agree_on_sequence, refuse_other_sequence, refuse_to_divide
from outrider.rank.rank_life import RankLife, RunSetting, check_num_samples
from outrider.rank.shared_evaluation import Evaluation
from outrider.rank.step_choice import agree_on_format, check_products, decide_execution, fit_micro_batch
from outrider.rank.stepper import Stepper
from outrider.record.disk_space import keep_model
from outrider.record.epoch_metrics import EpochMetrics
from outrider.record.run_config import RunConfig
from outrider.record.run_record import gpu_uuid, status_at_end
from outrider.replica.learning_words import joined_words, learning_words
from outrider.replica.out_of_memory import HINT, is_out_of_memory
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica
from outrider.world.messages import Link
from outrider.world.world import World, agree_on_interruption

PROGRESS_EVERY_S = 0.25


def train_rank(
    link: Link, recipe: Recipe, config: RunConfig, *, world: World, setting: RunSetting
) -> Iterator[EpochMetrics]:
    """Train on this rank; yields each epoch's metrics, which are the same on every rank."""
    with contextlib.ExitStack() as stack:
        run = TrainRun(RankLife(link, recipe, config, world=world, setting=setting, may_rest=True), recipe)
        stack.callback(run.close)
        run.prepare()
        while (epoch := run.next_epoch()) is not None:
            metrics = run.run_epoch(epoch)
            if metrics is not None:
                yield metrics
        run.finish()


class TrainRun:
    """One rank's part of `train()`, from the model to the trained model."""

    def __init__(self, life: RankLife, recipe: Recipe) -> None:
        self._life = life
        self._recipe = recipe
        self._link, self._world, self._config = life.link, life.world, life.config
        self._recorder = life.recorder
        self._epoch = 0
        self._remaining = Remaining.whole(0)
        """The rest of the epoch."""
        self._is_over = False
        self._last_progress_s = 0.0
        self._began_at = 0
        self._is_inside = False
        """Whether a segment is running."""
        self._feeds: list[Feed] = []
        self._sequence_before: str | None = None
        """Digest of the user's own order in the epoch of the checkpoint."""

    # Set-up

    def _make_replica(self) -> Replica:
        world = self._world
        try:
            return Replica(self._recipe, device=world.device, rank=world.rank, name=str(world.spec))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise DeviceError(
                f"rank {world.rank} ({world.spec}) has too little memory for the model alone: {named(error)}",
                hint=HINT,
                rank=world.rank,
            ) from error

    def prepare(self) -> None:
        """Do everything up to the first step; afterwards all ranks have the same parameters."""
        life, recipe, world = self._life, self._recipe, self._world
        self._recorder.event("joined")
        replica = self._replica = self._make_replica()
        replica.on_micro_batch, replica.on_loss_scale = self._tell_micro_batch, self._record
        feed = self._open_feed(recipe.dataset, augment=recipe.augment, length=recipe.length)
        orders = self._orders = self._open_orders(feed)
        life.num_samples = orders.num_positions
        life.loop_options = orders.batching
        self._recorder.event("data open")
        check_num_samples(orders.num_positions, world_size=world.size)
        refuse_to_divide(orders.sequence, recipe.policy_spec, world_size=world.size)
        tried = orders.trial_feed()
        agree_on_format(replica, tried, world=world, devices=life.devices, recorder=self._recorder)
        life.adopt(
            replica,
            clocks=DeviceClocks(world.device) if world.device.type == "cuda" else None,
            stop_requested=lambda: self._link.wants_stop,
            pause_due=life.clock.is_due,
            on_step=self._tell_progress,
            samples_seen=self._samples_seen,
            steps_at=lambda samples: samples // recipe.mean_batch_size,
        )
        # All ranks have met, so rank 0 got the folder; before that, it may hold files of another run.
        life.events.open()
        self._extent = recipe.extent(orders.num_positions, world.size)
        orders.refuse_other_lengths(self._extent.num_epochs)
        self._remaining = Remaining.whole(self._extent.epoch_samples)
        self._stepper = Stepper(life.driver, replica, scaled_ranks=self._scaled_ranks())
        has_callbacks = bool(self._config.epoch_start or self._config.epoch_end)
        self._epoch_end = EpochEnd(
            life.driver,
            self._open_evaluation(),
            world=world,
            has_callbacks=has_callbacks,
            # In the user's own process, code between two epochs may read the model.
            is_shown=not self._link.owns_process,
        )
        check_data(world, self._feeds)
        resumed = life.resume(self._identity())
        if resumed is not None:
            self._epoch, self._remaining = resumed.progress.epoch, resumed.progress.rest(self._extent.epoch_samples)
            self._sequence_before = resumed.state.get("sequence") if self._remaining.position else None
        if not orders.has_batches:
            fit_micro_batch(replica, tried, later_bytes=life.memory_later, recorder=self._recorder)
        check_products(replica, tried, world=world)
        averages = life.driver.averages
        decide_execution(replica, tried, recorder=self._recorder, can_overlap=lambda: averages.can_overlap)
        self._recorder.event("ready", device=str(world.spec), gpu=gpu_uuid(world.device), feed=feed.reason)
        self._record_compensation()
        life.begin_record()

    def _scaled_ranks(self) -> list[int]:
        """The ranks with loss scaling; all ranks call this."""
        chosen = self._replica.precision_choice
        if self._recipe.precision != "fp32":
            self._record(chosen)
        told = self._world.exchange_json(chosen.value, name="precisions")
        return [rank for rank, precision in enumerate(told) if precision == "fp16"]

    def _record(self, decision: Decision) -> None:
        self._recorder.event(decision.kind, value=decision.value, reason=decision.reason, **decision.details)

    def _tell_micro_batch(self, decision: Decision) -> None:
        """Report that memory ran out and the step was repeated with smaller micro-batches."""
        self._record(decision)
        self._link.send("micro-batch", device=str(self._world.spec), value=decision.value, reason=decision.reason)

    def _record_compensation(self) -> None:
        chosen = self._replica.compensation
        if self._world.rank == 0:
            value = {"outer": chosen.outer.kind, "learning rate follows ranks": chosen.follows_ranks}
            self._recorder.event("compensation", value=value, reason=chosen.reason)
            learning = learning_words(chosen, lr_scale=self._recipe.lr_scale)
            self._link.send("learning", words=joined_words(learning, self._life.memory_words))

    def _open_orders(self, feed: Feed) -> EpochOrders:
        recipe = self._recipe
        agree = partial(agree_on_sequence, self._world)
        return EpochOrders(feed, order=recipe.order, shuffle=recipe.shuffle, seed=recipe.seed, agree=agree)

    def _open_feed(self, dataset: Any, *, augment: AugmentFunction | None = None, length: int | None = None) -> Feed:
        feed = make_feed(
            dataset,
            device=self._world.device,
            workers=self._config.workers,
            collate=self._config.collate,
            resident=self._config.resident,
            seed=self._recipe.seed,
            augment=augment,
            length=length,
        )
        self._feeds.append(feed)
        return feed

    def _open_evaluation(self) -> Evaluation | None:
        if self._recipe.evaluate is None:
            return None
        data, config = self._recipe.eval_dataset, self._config
        feed = make_evaluation_feed(
            data,
            device=self._world.device,
            seed=self._recipe.seed,
            workers=config.workers,
            collate=config.collate,
            resident=config.resident,
        )
        self._feeds.append(feed)
        return Evaluation(
            self._replica,
            feed,
            partial(open_leases, self._world),
            world_size=self._world.size,
            batch_size=data.batch_size if isinstance(data, LoadedEvaluation) else None,
        )

    # Epochs

    def next_epoch(self) -> int | None:
        is_done = self._extent.is_done(self._epoch, self._remaining.position)
        return None if self._is_over or is_done else self._epoch

    def run_epoch(self, epoch: int) -> EpochMetrics | None:
        """Run one epoch with its evaluation and callbacks; None if a callback stopped the run before it."""
        if self._stops_before(epoch):
            return None
        life = self._life
        current = self._begin_pass(epoch)
        while current.left and not life.driver.is_stopped:
            self._run_segment(current)
        is_saving = self._config.every.is_due_after(epoch + 1) or life.driver.is_stopped
        self._epoch_end.catch_up(is_saving=is_saving)
        metrics = self._conclude(current, seconds=current.seconds)
        asked = self._call(self._config.epoch_end, epoch, metrics)
        # Without callbacks, the ranks' accounts already hold every request to stop.
        if self._epoch_end.has_callbacks:
            self._agree_to_stop(asked)
        self._go_on()
        return metrics

    def _stops_before(self, epoch: int) -> bool:
        """Whether a callback or the handle asks to stop before this epoch; the run can then be resumed from here."""
        if self._is_open:
            # With open windows there is no model to save; the next average carries a request to stop.
            return False
        asked = self._call(self._config.epoch_start, epoch, None)
        self._agree_to_stop(asked or self._link.wants_stop)
        if self._is_over:
            self._save(epoch, is_last=True)
        return self._is_over

    @property
    def _is_open(self) -> bool:
        """Whether windows of the last epoch continue in the next; the same on all ranks."""
        return self._life.driver.open_window is not None

    def _may_stay_open(self, epoch: int) -> bool:
        """Whether an epoch may end without an average: nobody reads the model, and nothing is saved."""
        is_last = self._extent.is_done(epoch, self._extent.stop(epoch))
        # All ranks learned of these wishes at the end of the previous epoch.
        is_asked = self._life.accounting.wants_stop or self._life.accounting.is_checkpoint_due
        is_due = is_asked or self._config.every.is_due_after(epoch + 1)
        return not (is_last or is_due or self._epoch_end.is_watched)

    def _agree_to_stop(self, wants_stop: bool) -> None:
        """End the run if any rank wants to stop; all ranks call this in the same order."""
        self._is_over = any(self._world.exchange_json(wants_stop, name="wishes to stop")) or self._is_over

    def _call(self, callback: Callable[[EpochContext], None] | None, epoch: int, metrics: EpochMetrics | None) -> bool:
        """Call the user's callback, if any; returns whether it asked to stop."""
        if callback is None:
            return False
        seen = self._extent.seen(epoch, self._remaining.position)
        context = EpochContext(
            epoch=epoch,
            rank=self._world.rank,
            is_main=self._world.rank == 0,
            model=self._replica.model,
            optimizer=self._replica.optimizer,
            metrics=metrics,
            samples_seen=seen,
            global_step=seen // self._recipe.mean_batch_size,
            progress=self._extent.progress(epoch, self._remaining.position),
        )
        with self._link.unwatched():
            self._replica.call_user("epoch_start" if metrics is None else "epoch_end", callback, context)
        return context.wants_stop

    def _begin_pass(self, epoch: int) -> EpochPass:
        """Open the epoch; its time starts when all ranks have arrived, because they set up at different speeds."""
        order = self._begin_order(epoch)
        current = EpochPass(
            epoch=epoch,
            batch_size=self._recipe.mean_batch_size,
            feed=self._orders.feed,
            order=order,
            remaining=self._remaining,
            stop=self._extent.stop(epoch),
            seen=self._extent.seen(epoch, 0),
            samples_after=self._extent.total - self._extent.seen(epoch, self._extent.stop(epoch)),
        )
        self._began_at = current.began_at
        if self._recipe.length is not None:
            told = self._world.exchange_json(stream_to_compare(current.feed), name="first samples")
            compare(self._world, told)
        self._life.accounting.open()
        started_s = time.perf_counter()
        self._world.barrier(f"the start of epoch {epoch}", timeout_s=self._config.timeout_s)
        self._life.start_clock(epoch, waited_s=time.perf_counter() - started_s)
        current.restart_time()
        return current

    def _begin_order(self, epoch: int) -> Tensor:
        order = self._orders.begin(epoch)
        before, self._sequence_before = self._sequence_before, None
        if before is not None and before != self._orders.digest:
            refuse_other_sequence(self._orders.name)
        return order

    def _run_segment(self, current: EpochPass) -> None:
        """Train up to the next cut, or until ranks agree to pause or stop; then save a checkpoint if due."""
        life = self._life
        self._is_inside = True
        self._stepper.run(life.next_segment(current, may_stay_open=self._may_stay_open(current.epoch)))
        self._is_inside = False
        current.end_segment(life.left_of_segment())
        self._remaining = current.remaining
        is_due = life.driver.is_paused or (self._config.every.is_within_epoch and not life.driver.is_cut)
        if is_due and current.left and not life.driver.is_stopped:
            life.accounting.tell(seconds=current.seconds)
            self._save(current.epoch)

    def _conclude(self, current: EpochPass, *, seconds: float) -> EpochMetrics:
        life, driver = self._life, self._life.driver
        with self._link.unwatched():
            evaluated = self._epoch_end.evaluate(f"eval/{current.epoch}/{self._remaining.position}")
        metrics = life.conclude(current.epoch, seconds=seconds, evaluated=evaluated, is_complete=not current.left)
        if life.splitter.lone is not None:
            self._epoch_end.judge(life.accounting.accounts, lone=life.splitter.lone)
        wants_stop = life.accounting.wants_stop and not self._is_open
        self._is_over = self._is_over or driver.is_stopped or wants_stop
        return metrics

    def _go_on(self) -> None:
        """Advance to the next epoch, with a checkpoint if one is due."""
        # A last epoch that was cut can continue if the run is resumed with more steps.
        if not self._remaining.count:
            self._epoch += 1
            self._remaining = Remaining.whole(self._extent.epoch_samples)
        # A stopped run can always be resumed. A checkpoint due by time waits for the next average if windows are open.
        if self._is_over or (self._life.is_checkpoint_due(self._epoch) and not self._is_open):
            self._save(self._epoch, is_last=self._is_over)
        self._life.log_epoch()

    def _samples_seen(self) -> int:
        """Samples of the whole world that averages have accounted for."""
        position = self._began_at + self._life.driver.reached if self._is_inside else self._remaining.position
        return self._extent.seen(self._epoch, position)

    def finish(self) -> None:
        """Write the model first, then the record and the merged timeline."""
        self._life.driver.catch_up()
        self._life.driver.merge_again()
        path = None
        if self._world.rank == 0 and not self._life.is_trial:
            path = str(keep_model(self._link, self._life.folder, self._replica.model.state_dict()))
        self._life.finish(status=self._status)
        told = self._world.exchange_json(path, name="model files at the end of the run")[0]
        if told is not None:
            self._link.tell_model(told)

    def _status(self) -> str:
        agree_on_interruption(self._link, self._world)
        is_complete = self._extent.is_done(self._epoch, self._remaining.position)
        return status_at_end(is_complete=is_complete, is_interrupted=self._link.interrupted_by is not None)

    def close(self) -> None:
        self._life.close()
        for feed in self._feeds:
            feed.close()

    def _tell_progress(self) -> None:
        now_s = time.perf_counter()
        if now_s - self._last_progress_s < PROGRESS_EVERY_S:
            return
        self._last_progress_s = now_s
        driver = self._life.driver
        self._link.send(
            "progress",
            epoch=self._epoch,
            samples=driver.meter.samples,
            num_samples=self._extent.stop(self._epoch),
            num_epochs=self._extent.num_epochs,
            reached=driver.reached,
            seen=self._extent.seen(self._epoch, self._began_at),
            total=self._extent.total,
            anchor=driver.anchor,
            loss=self._replica.loss_sums.mean_so_far() if self._world.device.type == "cpu" else None,
        )

    # Checkpoints

    def _identity(self) -> dict[str, Any]:
        return self._replica.identity() | {"num_samples": self._orders.num_positions}

    def _save(self, epoch: int, *, is_last: bool = False) -> None:
        remaining = self._remaining
        self._life.save(
            epoch,
            position=remaining.position,
            remaining=remaining,
            is_mid_epoch=remaining.position > 0 and remaining.count > 0,
            identity=self._identity(),
            rank_state={"sequence": self._orders.digest},
            is_last=is_last,
        )
