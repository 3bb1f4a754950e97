"""The accounting of an epoch on one rank: opened empty, closed by exchanging the accounts of all ranks.

Decides how the counts of driver, replica and recorder become the metrics of the world, and how leases are opened.
Called by `RankLife`, `TrainRun` and `SessionRun`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from outrider import faults
from outrider.data.leases import Leases, LocalLeases, StoreLeases
from outrider.policy.effects import Lease
from outrider.rank.driver import Driver
from outrider.rank.peak_memory import peak_memory_bytes
from outrider.rank.shared_evaluation import EvaluationSums
from outrider.record.epoch_metrics import EpochMetrics, RankAccount, combine
from outrider.replica.rank_replica import RankReplica
from outrider.timeline.recorder import Recorder
from outrider.world.world import World


class EpochAccounting:
    """What one rank counts from the start of an epoch to its end."""

    def __init__(self, driver: Driver, replica: RankReplica, world: World, *, recorder: Recorder) -> None:
        self._driver = driver
        self._recorder = recorder
        self._replica = replica
        self._world = world
        self._slept_s = 0.0
        self.accounts: list[RankAccount] = []
        """Accounts of all ranks when the accounting was last closed."""
        self.wants_stop = False
        """Whether any rank wanted to stop at the last exchange."""
        self.is_checkpoint_due = False
        """Whether a checkpoint was due by rank 0's clock when the accounting was last closed."""
        self.so_far: list[RankAccount] = []
        """Accounts of all ranks in the middle of an epoch; empty once the accounting is closed."""
        self.seconds_before = 0.0
        """Training time of this epoch before the checkpoint from which it continues, the same on all ranks."""
        self._before: RankAccount | None = None
        """This rank's part of the epoch before that checkpoint, without its time."""
        self._drained = (0.0, 0)
        self._logged: dict[str, tuple[float, float]] = {}

    def go_on(self, told: Sequence[dict[str, Any]]) -> None:
        """Continue an epoch that began before a checkpoint: `told` holds the accounts of the ranks of that world."""
        accounts = self.so_far = [RankAccount(**fields) for fields in told]
        # Ranks of that world worked at the same time: the time of the longest counts, whichever ranks continue.
        self.seconds_before = max((account.seconds for account in accounts), default=0.0)
        # If fewer ranks continue, each also takes over accounts of missing ranks.
        for account in accounts[self._world.rank :: self._world.size]:
            timeless = replace(account, seconds=0.0)
            self._before = timeless if self._before is None else timeless.after(self._before)

    def open(self) -> None:
        self._drained, self._logged = (0.0, 0), {}
        self._driver.open_epoch()

    def close(
        self,
        epoch: int,
        *,
        seconds: float,
        evaluated: EvaluationSums,
        wants_stop: bool,
        is_checkpoint_due: bool = False,
        train_s_before: float,
        first_s: float,
        is_complete: bool,
    ) -> EpochMetrics:
        """The world's metrics, the same on every rank; all ranks call this. `first_s`: start of the first epoch."""
        faults.reach("epoch-end")
        self._record_beside_training(epoch, evaluated)
        account = self._account(
            seconds=seconds, evaluated=evaluated, wants_stop=wants_stop, is_checkpoint_due=is_checkpoint_due
        )
        told_s = time.perf_counter()
        accounts = self.accounts = self._exchange(account, what=f"the end of epoch {epoch}")
        self._before, self.seconds_before, self.so_far = None, 0.0, []
        self.is_checkpoint_due = accounts[0].is_checkpoint_due
        recorder = self._recorder
        has_evaluated = any(one.eval_s for one in accounts)
        recorder.wait("evaluation" if has_evaluated else "epoch boundary", time.perf_counter() - told_s)
        self.wants_stop = any(one.wants_stop for one in accounts)
        metrics = self.merged(
            accounts, epoch=epoch, train_s_before=train_s_before, first_s=first_s, is_complete=is_complete
        )
        waits_ms = {cause: round(waited_s * 1e3, 3) for cause, waited_s in recorder.wait_s.items()}
        recorder.event("epoch end", epoch=epoch, loss=metrics.loss, eval=metrics.eval, waits_ms=waits_ms)
        return metrics

    def merged(
        self,
        accounts: Sequence[RankAccount],
        *,
        epoch: int,
        train_s_before: float,
        first_s: float,
        is_complete: bool,
    ) -> EpochMetrics:
        """The world's metrics from the accounts of all ranks."""
        return combine(
            accounts,
            epoch=epoch,
            learning_rate=self._replica.learning_rate,
            anchor=self._driver.anchor,
            drift=self._driver.drift,
            train_s_before=train_s_before,
            wall_s=time.perf_counter() - first_s,
            is_complete=is_complete,
        )

    def tell(self, *, seconds: float, wants_stop: bool = False) -> None:
        """Exchange the accounts in mid-epoch, and continue counting. All ranks call this."""
        account = self._account(seconds=seconds, evaluated=EvaluationSums(), wants_stop=wants_stop)
        self.so_far = self._exchange(account, what="the accounts of a pass over the data")
        self.wants_stop = any(one.wants_stop for one in self.so_far)

    def _exchange(self, account: RankAccount, *, what: str) -> list[RankAccount]:
        told = self._world.exchange_json(asdict(account), name="accounts", what=what)
        return [RankAccount(**fields) for fields in told]

    def _drain(self) -> None:
        """Add the losses and logged values since the last call."""
        loss_sum, loss_samples = self._replica.loss_sums.drain()
        self._drained = (self._drained[0] + loss_sum, self._drained[1] + loss_samples)
        for name, (total, weight) in self._replica.logged_scalars.drain().items():
            before = self._logged.get(name, (0.0, 0.0))
            self._logged[name] = (before[0] + total, before[1] + weight)

    def _account(
        self, *, seconds: float, evaluated: EvaluationSums, wants_stop: bool, is_checkpoint_due: bool = False
    ) -> RankAccount:
        """This rank's part of the epoch from its start, including the part before a checkpoint."""
        meter = self._driver.meter
        self._drain()
        account = RankAccount(
            loss_sum=self._drained[0],
            loss_samples=self._drained[1],
            eval_sum=evaluated.total,
            eval_samples=evaluated.samples,
            samples=meter.samples,
            logged=self._logged,
            averages=meter.averages,
            average_cost_s=meter.average_cost_s,
            wait_s=meter.average_wait_s,
            seconds=self.seconds_before + seconds,
            eval_s=evaluated.seconds,
            catch_up_s=evaluated.catch_up_s,
            wants_stop=wants_stop,
            is_checkpoint_due=is_checkpoint_due,
            peak_memory_bytes=peak_memory_bytes(self._world.device),
        )
        return account if self._before is None else account.after(self._before)

    def _record_beside_training(self, epoch: int, evaluated: EvaluationSums) -> None:
        recorder, slept_before_s, self._slept_s = self._recorder, self._slept_s, self._driver.meter.slept_s
        if evaluated.seconds:
            recorder.event("evaluation", epoch=epoch, ms=round(evaluated.seconds * 1e3, 3))
        slept_s = self._slept_s - slept_before_s
        if slept_s > 0:
            recorder.event("throttle", epoch=epoch, ms=round(slept_s * 1e3, 3))


def open_leases(world: World, key: str, span: Lease, *, batch_size: int) -> Leases:
    """The ledger of a span; ranks that use the same key share it."""
    if world.size == 1:
        return LocalLeases(span, batch_size=batch_size)
    return StoreLeases(world.store, key, span, rank=world.rank, batch_size=batch_size)
