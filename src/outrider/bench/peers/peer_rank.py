"""One rank of a peer, epoch by epoch: the same data, schedule, throttle, evaluation and records as Outrider's modes.

Decides the equal split of an epoch among ranks; the peer's Method decides how a step is shared. Started by
`Peer.start`, in one process per device, or in one process for peers with a single process.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.bench.peers.method import Method, OpenMethod
from outrider.data.feed import make_feed
from outrider.data.order import in_order, shuffled
from outrider.policy.effects import Batch, Lease
from outrider.rank.epoch_accounting import open_leases
from outrider.rank.peak_memory import peak_memory_bytes
from outrider.rank.rank_life import RunSetting
from outrider.rank.shared_evaluation import Evaluation, EvaluationSums
from outrider.rank.step_choice import agree_on_format
from outrider.rank.throttle import Throttle
from outrider.rank.train_run import PROGRESS_EVERY_S
from outrider.record.epoch_metrics import EpochMetrics, RankAccount, as_json, combine
from outrider.record.run_events import RunEvents
from outrider.record.run_folder import SCHEMA_VERSION, RunFolder
from outrider.record.run_record import commit, environment, gpu_uuid, totals
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica
from outrider.world.messages import Link
from outrider.world.world import World


def run_peer_rank(
    link: Link,
    *,
    open_method: OpenMethod,
    recipe: Recipe,
    setting: RunSetting,
    options: dict[str, Any],
    timeout_s: float,
) -> None:
    """The function of each process."""
    with World.join(link, timeout_s=timeout_s) as world:
        rank = PeerRank(link, recipe, world=world, setting=setting, options=options)
        with closing(rank.events):
            _train(rank, open_method)
        del rank
        # DDP must be gone before its process group: as the last to hold one, its destructor waits for a thread of the
        # group while it holds the interpreter's lock, which that thread may want.
        gc.collect()


def _train(rank: PeerRank, open_method: OpenMethod) -> None:
    rank.prepare()
    with open_method(rank.replica, rank.world, rank.setting) as method:
        for epoch in range(rank.recipe.epochs):
            metrics = rank.run_epoch(epoch, method)
            if rank.world.rank == 0:
                rank.link.send("epoch", **as_json(metrics))
            if rank.is_stopped:
                break
        rank.finish(method)


def dealt(order: Tensor, *, rank: int, world_size: int) -> Tensor:
    """A rank's samples as DistributedSampler deals them: every world_size-th, the first ones again to make it even."""
    padding = -len(order) % world_size
    return torch.cat([order, order[:padding]])[rank::world_size]


class PeerRank:
    """The state of a rank between epochs, the same for all peers."""

    def __init__(
        self, link: Link, recipe: Recipe, *, world: World, setting: RunSetting, options: dict[str, Any]
    ) -> None:
        self.link = link
        self.recipe = recipe
        self.world = world
        self.setting = setting
        self.options = options
        self.folder = RunFolder(setting.folder)
        self.started_at = datetime.fromtimestamp(setting.origin_s).astimezone().isoformat(timespec="seconds")
        self.commit = commit() if world.rank == 0 else None
        self.history: list[EpochMetrics] = []
        self.events = RunEvents(self.folder, world, origin_s=setting.origin_s, has_pulses=False)
        self.recorder = self.events.recorder
        self.recorder.event("joined")
        self.replica = Replica(recipe, device=world.device, rank=world.rank, name=str(world.spec))
        self.feed = make_feed(recipe.dataset, device=world.device, seed=recipe.seed, augment=recipe.augment)
        self.recorder.event("data open")
        self.evaluation = self._open_evaluation()
        self.throttle = Throttle(world.spec.speed)
        # A process that drives several devices takes a batch for each of them.
        self.batch_size = recipe.mean_batch_size * len(setting.devices) // world.size
        self.is_stopped = False
        self.samples = 0
        self.blocked_s: list[float] = []
        self._averages_before = 0
        self._first_epoch_s = 0.0
        self._last_progress_s = 0.0
        self._slept_s = 0.0

    def prepare(self) -> None:
        """Everything that the ranks agree on before a peer wraps their replicas."""
        agree_on_format(self.replica, self.feed, world=self.world, devices=self.setting.devices, recorder=self.recorder)
        self.events.open()
        device = self.world.device
        self.recorder.event("ready", device=str(self.world.spec), gpu=gpu_uuid(device), feed=self.feed.reason)

    def _open_evaluation(self) -> Evaluation | None:
        if self.recipe.evaluate is None:
            return None
        feed = make_feed(self.recipe.eval_dataset, device=self.world.device, seed=self.recipe.seed)
        return Evaluation(self.replica, feed, partial(open_leases, self.world), world_size=self.world.size)

    # An epoch

    def run_epoch(self, epoch: int, method: Method) -> EpochMetrics:
        num_mine = self._start_epoch(epoch, method)
        started_s = time.perf_counter()
        with ExitStack() as scope:
            scope.enter_context(method.epoch())
            for batch in Lease(0, num_mine).batches(self.batch_size, least=1):
                self._step(epoch, batch, method)
            with self._watched():
                scope.close()
        self._wait_for_device()
        metrics = self._conclude(epoch, time.perf_counter() - started_s, method)
        self.history.append(metrics)
        if self.world.rank == 0:
            self._write_record(status="running")
        return metrics

    def _start_epoch(self, epoch: int, method: Method) -> int:
        """Wait until all ranks are here; returns how many samples are this rank's."""
        order = self._order(epoch)
        self.feed.start_epoch(order, epoch)
        self.samples, self.blocked_s, self._averages_before = 0, [], method.averages()
        self.recorder.reset_waits()
        arrived_s = time.perf_counter()
        self.world.barrier(f"the start of epoch {epoch}")
        now_s = time.perf_counter()
        self.recorder.wait("epoch boundary" if self._first_epoch_s else "startup", now_s - arrived_s)
        self._first_epoch_s = self._first_epoch_s or now_s
        self.recorder.event("epoch start", epoch=epoch)
        return len(order)

    def _order(self, epoch: int) -> Tensor:
        num_samples = self.feed.num_samples
        order = (
            shuffled(num_samples, seed=self.recipe.seed, epoch=epoch) if self.recipe.shuffle else in_order(num_samples)
        )
        return dealt(order, rank=self.world.rank, world_size=self.world.size)

    def _step(self, epoch: int, batch: Batch, method: Method) -> None:
        with self._watched():
            data = self.feed.fetch(batch)
            self.replica.optimizer.zero_grad(set_to_none=True)
            with self.replica.autocast():
                loss = self.recipe.step(method.model, data)
            method.backward(loss)
            self.replica.update(at=epoch * self.feed.num_samples + batch.start * self.world.size)
            method.after_step()
            self.replica.loss_sums.add(loss, batch.count, self.replica.steps)
        self.samples += batch.count
        self._tell_progress(epoch)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Throttled, and measured for how long it was blocked."""
        with self.throttle:
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            yield
            # A rank that waits for others uses no CPU time, so wall time minus CPU time is waiting.
            blocked_s = (time.perf_counter() - wall_s) - (time.thread_time() - cpu_s)
        self.blocked_s.append(blocked_s)
        if self.world.device.type == "cpu":
            self.recorder.add_wait("average", blocked_s)

    def _wait_for_device(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)

    def _tell_progress(self, epoch: int) -> None:
        now_s = time.perf_counter()
        if now_s - self._last_progress_s < PROGRESS_EVERY_S:
            return
        self._last_progress_s = now_s
        self.link.send(
            "progress",
            epoch=epoch,
            samples=self.samples,
            num_samples=self.feed.num_samples,
            anchor=None,
            loss=self.replica.loss_sums.mean_so_far() if self.world.device.type == "cpu" else None,
        )

    # What is known of it

    def _conclude(self, epoch: int, seconds: float, method: Method) -> EpochMetrics:
        evaluating_s = time.perf_counter()
        evaluated = self._evaluate(epoch, method)
        eval_s = time.perf_counter() - evaluating_s
        averages = method.averages() - self._averages_before
        account = self._account(evaluated, averages=averages, seconds=seconds, eval_s=eval_s)
        accounts = [RankAccount(**fields) for fields in self.world.exchange_json(asdict(account))]
        # Decided from the values of all ranks, so that all leave together.
        self.is_stopped = any(one.wants_stop for one in accounts)
        metrics = self._combine(accounts, epoch)
        self._record_epoch(metrics)
        return metrics

    def _combine(self, accounts: list[RankAccount], epoch: int) -> EpochMetrics:
        return combine(
            accounts,
            epoch=epoch,
            learning_rate=self.replica.optimizer.param_groups[0]["lr"],
            anchor=None,
            drift=None,
            train_s_before=self.history[-1].train_s if self.history else 0.0,
            wall_s=time.perf_counter() - self._first_epoch_s,
            is_complete=True,
        )

    def _record_epoch(self, metrics: EpochMetrics) -> None:
        epoch, recorder = metrics.epoch, self.recorder
        if self.evaluation is not None:
            recorder.event("evaluation", epoch=epoch, ms=round(metrics.eval_s * 1e3, 3))
        slept_s, self._slept_s = self.throttle.slept_s - self._slept_s, self.throttle.slept_s
        if slept_s > 0:
            recorder.event("throttle", epoch=epoch, ms=round(slept_s * 1e3, 3))
        waits_ms = {cause: round(seconds * 1e3, 3) for cause, seconds in recorder.wait_s.items()}
        recorder.event("epoch end", epoch=epoch, loss=metrics.loss, eval=metrics.eval, waits_ms=waits_ms)

    def _evaluate(self, epoch: int, method: Method) -> EvaluationSums:
        if self.evaluation is None:
            return EvaluationSums()
        with method.as_one_model():
            # Rank 0's BatchNorm statistics are the model's: it is rank 0's model that is saved.
            if method.group is not None:
                for buffer in self.replica.model.buffers():
                    dist.broadcast(buffer, src=0, group=method.group)
            return self.evaluation.run(f"eval/{epoch}")

    def _account(self, evaluated: EvaluationSums, *, averages: int, seconds: float, eval_s: float) -> RankAccount:
        loss_sum, loss_samples = self.replica.loss_sums.drain()
        cost_s = self._average_cost_s()
        return RankAccount(
            loss_sum=loss_sum,
            loss_samples=loss_samples,
            eval_sum=evaluated.total,
            eval_samples=evaluated.samples,
            samples=self.samples,
            logged=self.replica.logged_scalars.drain(),
            averages=averages,
            average_cost_s=cost_s,
            wait_s=sum(self.blocked_s) - cost_s,
            seconds=seconds,
            eval_s=eval_s,
            wants_stop=self.link.stop_requested.is_set(),
            peak_memory_bytes=peak_memory_bytes(self.world.device),
        )

    def _average_cost_s(self) -> float:
        """Estimate waits: in each step the least blocked rank did not wait. Not possible on a GPU."""
        if self.world.device.type != "cpu":
            return float("nan")
        blocked_s = self.world.exchange_json(self.blocked_s, name="blocked times")
        return float(sum(min(step) for step in zip(*blocked_s, strict=True)))

    def _write_record(self, *, status: str) -> None:
        epochs = [as_json(metrics) for metrics in self.history]
        self.folder.write_json(
            "record.json",
            {
                "schema_version": SCHEMA_VERSION,
                "status": status,
                "started_at": self.started_at,
                "policy": self.options["policy"],
                "backend": self.setting.backend,
                "devices": self.setting.devices,
                "resumed_from": None,
                "num_samples": self.feed.num_samples,
                "parameters": sum(one.numel() for one in self.replica.model.parameters() if one.requires_grad),
                "options": self.options,
                "environment": environment(),
                "commit": self.commit,
                "epochs": epochs,
                "totals": totals(epochs),
            },
        )

    def finish(self, method: Method) -> None:
        """Leave the model, the record and the merged timeline behind."""
        if self.world.rank == 0:
            if method.holds_whole_model:
                with method.as_one_model():
                    self.folder.write_model(self.replica.model.state_dict())
            self._write_record(status="stopped" if self.is_stopped else "finished")
        self.events.merge()
        self.world.barrier("the end of the run")
