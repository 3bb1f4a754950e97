"""The training epochs of a Trainer as passes of a session, and the counters that Lightning derives from them.

Decides how an epoch of Lightning is cut into passes, when all ranks meet at its end, and what `trainer.global_step` is
where ranks take unequal numbers of steps. `OutriderStrategy` owns one `TrainerEpochs` per call of `fit`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from outrider.api.loaders import as_source
from outrider.api.session_batches import SessionBatches
from outrider.data.order import in_order, shuffled
from outrider.errors import ConfigError
from outrider.integrations.lightning_ranks import LightningRanks

_NEVER = sys.maxsize
_EPOCHS_WITHOUT_END = 1_000_000


class LeasedLoader:
    """The training data as Lightning sees it: `len()` is the number of steps of an epoch, batches are this rank's."""

    def __init__(self, loader: DataLoader[Any], ranks: LightningRanks) -> None:
        self.loader = loader
        self.dataset, self.batch_size = loader.dataset, loader.batch_size
        self._ranks = ranks
        self._num_batches = 0
        """Known while the session is open; Lightning asks again after it."""
        self.epochs: TrainerEpochs | None = None

    def __len__(self) -> int:
        """Steps of an epoch: of all ranks together, or with `sync`, which joins a batch of each, of every rank."""
        if self._ranks.session is not None:
            self._num_batches = len(self._ranks.session.batches(self.loader))
        num_batches = self._num_batches
        return -(-num_batches // (self._ranks.world_size if self._ranks.policy.joins_batches else 1))

    def __iter__(self) -> Iterator[Any]:
        assert self.epochs is not None, "fit() sets up the model before it takes batches"
        return self.epochs.batches(self)


class TrainerEpochs:
    """The passes of one `fit`, on this rank."""

    def __init__(self, trainer: pl.Trainer, ranks: LightningRanks) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._session = ranks.opened
        self._loop = trainer.fit_loop.epoch_loop
        self._numbers: Iterator[int] | None = None
        self._pass: SessionBatches | None = None
        self._handed = 0
        """Batches of this epoch that this rank got."""
        self._length = 0
        self._began_at = 0
        """Samples of the world before this epoch."""
        self._steps_before = 0
        """`trainer.global_step` before this epoch."""
        self._num_steps = 0
        """Steps of this epoch, known before it begins."""
        self._validate_every = _NEVER
        self.schedule_steps: Callable[[int], None] = lambda steps: None
        """Moves schedules per step to where they are after so many steps of the world."""

    # The batches of an epoch

    def batches(self, loader: LeasedLoader) -> Iterator[Any]:
        """This rank's batches of the next epoch; where ranks take unequal numbers, also its end, in which they meet."""
        self._begin(loader)
        for start, stop in pairwise(self._cuts(loader)):
            self._pass = self._open(loader, start, stop)
            for batch in self._pass:
                self._handed += 1
                yield batch
            self._end_pass()
            if not self._ranks.takes_same_steps:
                self._end_part(stop)
            if self._stops_early():
                return

    def _stops_early(self) -> bool:
        return bool(self._trainer.should_stop and self._trainer.fit_loop._can_stop_early)

    def _begin(self, loader: LeasedLoader) -> None:
        trainer = self._trainer
        combined = trainer.fit_loop._combined_loader
        if combined is not None and len(combined.flattened) > 1:
            raise ConfigError(
                f"{len(combined.flattened)} training loaders, and ranks share the batches of one",
                hint="join the data sets in one, for instance with torch.utils.data.StackDataset or ConcatDataset",
            )
        self.leave()
        self._next_epoch(loader)
        self._handed, self._began_at = 0, self._session.samples_seen
        self._steps_before = trainer.global_step
        self._length = len(loader)
        if not self._ranks.takes_same_steps:
            self._limit(loader)

    def _next_epoch(self, loader: LeasedLoader) -> None:
        if self._numbers is None:
            # Where ckpt_path goes on; the order of samples is that of the epoch's number.
            self._session._joined().first_epoch = self._trainer.current_epoch
            self._numbers = self._session.epochs(_num_epochs(self._trainer, len(loader)))
        next(self._numbers)

    def _open(self, loader: LeasedLoader, start: int, stop: int) -> SessionBatches:
        if (start, stop) == (0, len(loader)):
            return self._session.batches(loader.loader)
        source = as_source(loader.loader, batch_size=None)
        if source.length is not None or (source.sequence is not None and source.sequence.has_batches):
            raise ConfigError(
                "limit_train_batches, max_steps and val_check_interval cut an epoch into parts, which is not possible "
                f"with a stream or a batch sampler and policy {self._ranks.policy.name!r}",
                hint='pass policy="sync" or "balanced", or leave them out',
            )

        def part(epoch: int) -> Any:
            size, num_samples = source.batch_size, len(loader.dataset)  # type: ignore[arg-type]
            seed = self._ranks.seed if source.order_seed is None else source.order_seed
            if source.sequence is not None:
                order = source.sequence.draw(num_samples=num_samples, seed=seed, epoch=epoch).indices
            else:
                order = shuffled(num_samples, seed=seed, epoch=epoch) if source.shuffle else in_order(num_samples)
            return order[start * size : stop * size]

        return self._session.batches(loader.loader, order=part)

    # Where ranks take unequal numbers of steps: parts between validations, and their ends

    def _limit(self, loader: LeasedLoader) -> None:
        """The epoch ends where Lightning's limits say, counted over all ranks."""
        trainer, per_step = self._trainer, self._trainer.accumulate_grad_batches
        limit = min(self._length, int(trainer.fit_loop.max_batches))
        if trainer.max_steps != -1:
            limit = min(limit, (trainer.max_steps - self._steps_before) * per_step)
        self._length = limit
        self._num_steps = -(-limit // per_step)

    def _cuts(self, loader: LeasedLoader) -> list[int]:
        trainer = self._trainer
        if self._ranks.takes_same_steps:
            return [0, self._length]
        if trainer._val_check_time_interval is not None or trainer.check_val_every_n_epoch is None:
            raise ConfigError(
                f"val_check_interval by time or across epochs: with policy {self._ranks.policy.name!r} ranks are at "
                "different steps then",
                hint='pass val_check_interval=1.0 or a part of an epoch, or policy="balanced"',
            )
        if trainer.val_check_batch != _NEVER:
            # Lightning would count this rank's batches, and ranks would validate at different times.
            self._validate_every = int(min(trainer.val_check_batch or _NEVER, _NEVER - 1))
            trainer.val_check_batch = _NEVER
        return [*range(0, self._length, self._validate_every), self._length]

    def _end_part(self, stop: int) -> None:
        """What Lightning does after the last batch of an epoch or of a part, once all ranks are here."""
        loop, trainer = self._loop, self._trainer
        is_cut_short = self._stops_early()
        loop.batch_progress.is_last_batch = is_last = stop == self._length and not is_cut_short
        if is_last:
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        # As in Lightning, batches at the end of an epoch that fill no interval are not followed by a validation.
        if loop._should_check_val_epoch() and (is_cut_short or stop % self._validate_every == 0):
            first = trainer._logger_connector._first_loop_iter
            trainer.validating = True
            loop.val_loop.run()
            trainer.training = True
            trainer._logger_connector._first_loop_iter = first

    # Meetings of all ranks

    def before_meeting(self, what: str) -> None:
        """All ranks are about to meet: end the pass if it is over, and refuse what would wait in the middle of it."""
        if self._pass is None:
            return
        has_batch = self._loop.batch_progress.current.processed < self._loop.batch_progress.current.ready
        if self._ranks.takes_same_steps:
            if not has_batch and self._handed == self._length:
                self.leave()
        elif not has_batch and self._trainer.should_stop:
            self.leave()
        else:
            raise ConfigError(
                f"{what} in the middle of an epoch waits for all ranks, but with policy {self._ranks.policy.name!r} "
                "they are at different batches and take different numbers of them",
                hint="do it at the end of an epoch (self.log(..., on_step=False, on_epoch=True), every_n_epochs=, "
                'Timer(interval="epoch")), or pass policy="balanced" or "sync"',
            )

    def leave(self) -> None:
        """End the pass under way, complete or not; all ranks do."""
        if self._pass is None:
            return
        if self._handed == self._length and self._ranks.takes_same_steps:
            # Lightning knows the last batch by its number and does not ask for another.
            next(self._pass, None)
        self._end_pass()

    def _end_pass(self) -> None:
        trainer, self._pass = self._trainer, None
        told = self._session.gather([bool(trainer.should_stop), self._handed])
        trainer.should_stop = any(stops for stops, _ in told)
        idle = [rank for rank, (_, handed) in enumerate(told) if not handed]
        if idle:
            raise ConfigError(
                f"rank {idle[0]} took no batch of an epoch of {self._length}, and Lightning waits for the logs of "
                "every rank",
                hint='use a smaller batch_size, fewer devices, or policy="balanced", which divides every batch',
            )
        if not self._ranks.takes_same_steps:
            self._count(self._steps_now())

    @property
    def is_in_pass(self) -> bool:
        return self._pass is not None

    # Counters

    def _steps_now(self) -> int:
        """Steps of the world in this epoch, all ranks being here; complete, or as far as it went."""
        seen = self._session.samples_seen - self._began_at
        per_step = self._batch_samples * int(self._trainer.accumulate_grad_batches)
        return min(self._num_steps, -(-seen // per_step))

    @property
    def _batch_samples(self) -> int:
        loader = self._trainer.fit_loop._combined_loader
        assert loader is not None
        return int(loader.flattened[0].batch_size or 1)

    def before_step(self, *, is_first: bool) -> None:
        """A step of this rank: count the steps of the other ranks since the last one as well."""
        if self._ranks.takes_same_steps or not is_first:
            return
        unit = self._batch_samples * self._trainer.accumulate_grad_batches
        done = (self._session.samples_seen - self._began_at) // unit
        self.schedule_steps(self._steps_before + done)
        progress = _step_progress(self._trainer)
        # Only the end of the pass is the end of the epoch, on all ranks at once.
        before = min(max(self._steps_before + done, progress.completed), self._steps_before + self._num_steps - 2)
        progress.completed = max(self._steps_before, before)
        progress.ready = progress.completed + 1

    def _count(self, steps: int) -> None:
        """All ranks are here, and at the same step."""
        total = self._steps_before + steps
        self.schedule_steps(total)
        progress = _step_progress(self._trainer)
        progress.ready = progress.completed = total


def _step_progress(trainer: pl.Trainer) -> Any:
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        return loop.automatic_optimization.optim_progress.optimizer.step.total
    return loop.manual_optimization.optim_step_progress.total


def _num_epochs(trainer: pl.Trainer, num_batches: int) -> int:
    """How long the run is, as far as Lightning knows."""
    if trainer.max_steps != -1:
        num_steps = -(-min(num_batches, int(trainer.fit_loop.max_batches)) // trainer.accumulate_grad_batches)
        return int(trainer.current_epoch + max(1, -(-trainer.max_steps // max(1, num_steps))))
    return int(_EPOCHS_WITHOUT_END if trainer.max_epochs in (None, -1) else trainer.max_epochs)
