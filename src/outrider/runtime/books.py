"""An epoch's books on one rank: opened empty, closed by telling the others what this rank did.

Decides how what driver, replica and recorder counted becomes the metrics of the world, and how ranks share positions.
Called by the rank of a run and by the session, which both count in the same way.
"""

from __future__ import annotations

import time
from dataclasses import asdict

from outrider.core.effects import Lease
from outrider.data.leases import Leases, LocalLeases, StoreLeases
from outrider.replica.loop_replica import LoopReplica
from outrider.replica.replica import Replica
from outrider.runtime.driver import Driver
from outrider.runtime.evaluation import Evaluated
from outrider.runtime.memory import peak_memory_bytes
from outrider.runtime.metrics import EpochMetrics, RankAccount, combine
from outrider.runtime.window import AverageAccount
from outrider.runtime.world import World


class Books:
    """What one rank counts from the start of an epoch to its end."""

    def __init__(self, driver: Driver, replica: Replica | LoopReplica, world: World) -> None:
        self._driver = driver
        self._replica = replica
        self._world = world
        self._slept_s = 0.0
        self.accounts: list[RankAccount] = []
        """What the ranks told when the books were closed last."""
        self.wants_stop = False
        """Whether any rank wanted to stop when the books were closed last."""

    def open(self) -> None:
        driver = self._driver
        driver.account = AverageAccount()
        driver.samples = driver.reached = 0
        driver.recorder.wait_s = dict.fromkeys(driver.recorder.wait_s, 0.0)

    def close(
        self,
        epoch: int,
        *,
        seconds: float,
        evaluated: Evaluated,
        wants_stop: bool,
        train_s_before: float,
        first_s: float,
        is_complete: bool,
    ) -> EpochMetrics:
        """The world's metrics, the same on every rank; all ranks call this. `first_s` is when the first epoch began."""
        self._record_beside_training(epoch, evaluated)
        account = self._account(seconds=seconds, evaluated=evaluated, wants_stop=wants_stop)
        told_s = time.perf_counter()
        told = self._world.exchange_json(asdict(account), name="accounts")
        accounts = self.accounts = [RankAccount(**fields) for fields in told]
        recorder = self._driver.recorder
        has_evaluated = any(one.eval_s for one in accounts)
        recorder.wait("evaluation" if has_evaluated else "epoch boundary", time.perf_counter() - told_s)
        self.wants_stop = any(one.wants_stop for one in accounts)
        metrics = combine(
            accounts,
            epoch=epoch,
            learning_rate=self._replica.learning_rate,
            anchor=self._driver.anchor,
            drift=self._driver.drift,
            train_s_before=train_s_before,
            wall_s=time.perf_counter() - first_s,
            is_complete=is_complete,
        )
        waits_ms = {cause: round(waited_s * 1e3, 3) for cause, waited_s in recorder.wait_s.items()}
        recorder.event("epoch end", epoch=epoch, loss=metrics.loss, eval=metrics.eval, waits_ms=waits_ms)
        return metrics

    def _account(self, *, seconds: float, evaluated: Evaluated, wants_stop: bool) -> RankAccount:
        driver = self._driver
        loss_sum, loss_samples = self._replica.tally.drain()
        return RankAccount(
            loss_sum=loss_sum,
            loss_samples=loss_samples,
            eval_sum=evaluated.total,
            eval_samples=evaluated.samples,
            samples=driver.samples,
            logged=self._replica.logbook.drain(),
            averages=driver.account.averages,
            average_cost_s=driver.account.cost_s,
            wait_s=driver.account.wait_s,
            seconds=seconds,
            eval_s=evaluated.seconds,
            catch_up_s=evaluated.catch_up_s,
            wants_stop=wants_stop,
            peak_memory_bytes=peak_memory_bytes(self._world.device),
        )

    def _record_beside_training(self, epoch: int, evaluated: Evaluated) -> None:
        recorder, throttle = self._driver.recorder, self._driver.throttle
        if evaluated.seconds:
            recorder.event("evaluation", epoch=epoch, ms=round(evaluated.seconds * 1e3, 3))
        slept_s, self._slept_s = throttle.slept_s - self._slept_s, throttle.slept_s
        if slept_s > 0:
            recorder.event("throttle", epoch=epoch, ms=round(slept_s * 1e3, 3))


def open_leases(world: World, key: str, span: Lease, *, batch_size: int) -> Leases:
    """The ledger of a span; ranks that use the same key share it."""
    if world.size == 1:
        return LocalLeases(span, batch_size=batch_size)
    return StoreLeases(world.store, key, span, rank=world.rank, batch_size=batch_size)
