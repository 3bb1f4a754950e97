"""torch's DistributedDataParallel on the same devices, replicas, feed, throttle and evaluation as Outrider's modes.

Decides only what DDP decides: equal batches in the order of DistributedSampler, gradients averaged at every step.
Called by the benchmarks through `start_ddp`; its records have the shape of any other run's.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from outrider.api.handle import StartedRun
from outrider.api.options import Order
from outrider.core.effects import Batch, Lease
from outrider.data.feed import Feed, make_feed
from outrider.data.leases import Leases, LocalLeases, StoreLeases
from outrider.data.order import in_order, shuffled
from outrider.errors import DeviceError
from outrider.machine.devices import DeviceSpec, cuda_devices, resolve_devices
from outrider.replica import recipe as recipes
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica
from outrider.runtime import config as configs
from outrider.runtime.evaluation import Evaluated, Evaluation
from outrider.runtime.folder import SCHEMA_VERSION, RunFolder
from outrider.runtime.launch import launch
from outrider.runtime.messages import Link, Message
from outrider.runtime.metrics import EpochMetrics, RankAccount, as_json, combine
from outrider.runtime.rank import PROGRESS_EVERY_S, RunSetting
from outrider.runtime.record import commit, environment, totals
from outrider.runtime.throttle import Throttle
from outrider.runtime.world import World, choose_backend

POLICY = "ddp"


def start_ddp(order: Order, *, on_message: Callable[[Message], None] = lambda message: None) -> StartedRun:
    """Start one DDP rank per device; returns at once with the same handle as `train()`."""
    config = order.config
    assert config.run_dir is not None, "benchmarks name their run folders"
    specs = resolve_devices(config.devices, cuda_devices=cuda_devices()).devices
    devices = tuple(str(spec) for spec in specs)
    setting = RunSetting(folder=config.run_dir, origin_s=time.time(), backend=_backend(specs), devices=devices)
    options = recipes.settings(order.recipe) | configs.settings(config) | {"policy": POLICY}
    folder = RunFolder(config.run_dir)
    folder.create()
    folder.write_json(
        "config.json",
        {"schema_version": SCHEMA_VERSION, "devices": devices, "backend": setting.backend, "options": options},
    )
    payload = {"recipe": order.recipe, "setting": setting, "options": options, "timeout_s": config.timeout_s}
    ranks = launch(
        run_ddp_rank, payload, devices=specs, log_dir=folder.path, port=config.port, num_threads=config.threads_per_rank
    )
    return StartedRun(ranks, folder, on_message=on_message)


def _backend(specs: Sequence[DeviceSpec]) -> str:
    """Gloo between CPU ranks, NCCL between CUDA ranks; DDP has no way to join a mix of them."""
    if all(spec.kind == "cpu" for spec in specs):
        return "cpu"
    if any(spec.kind != "cuda" for spec in specs):
        raise DeviceError(
            f"torch DDP cannot join devices of different kinds: {', '.join(map(str, specs))}",
            hint="name only CPU ranks or only CUDA devices, or leave the mode ddp out",
        )
    return choose_backend("nccl", specs).backend


def run_ddp_rank(link: Link, *, recipe: Recipe, setting: RunSetting, options: dict[str, Any], timeout_s: float) -> None:
    """What each started process does."""
    with World.join(link, timeout_s=timeout_s) as world:
        _train(DdpRank(link, recipe, world=world, setting=setting, options=options))
        # DDP must be gone before its process group: as the last to hold one, its destructor waits for a thread of the
        # group while it holds the interpreter's lock, which that thread may want.
        gc.collect()


def _train(rank: DdpRank) -> None:
    for epoch in range(rank.recipe.epochs):
        metrics = rank.run_epoch(epoch)
        if rank.world.rank == 0:
            rank.link.send("epoch", **as_json(metrics))
        if rank.is_stopped:
            break
    rank.finish()


def dealt(order: Tensor, *, rank: int, world_size: int) -> Tensor:
    """A rank's samples as DistributedSampler deals them: every world_size-th, the first ones again to make it even."""
    padding = -len(order) % world_size
    return torch.cat([order, order[:padding]])[rank::world_size]


class DdpRank:
    """One rank of a DDP run, epoch by epoch."""

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
        self.replica = Replica(recipe, device=world.device, rank=world.rank, name=str(world.spec))
        self.group = world.group_for(setting.backend)
        self.model = DistributedDataParallel(self.replica.model, process_group=self.group)
        self.feed = self._open_feed(recipe.dataset)
        self.evaluation = self._open_evaluation()
        self.throttle = Throttle(world.spec.speed)
        self.is_stopped = False
        self.samples = 0
        self.blocked_s: list[float] = []
        self._first_epoch_s = 0.0
        self._last_progress_s = 0.0

    def _open_feed(self, dataset: Any) -> Feed:
        return make_feed(dataset, device=self.world.device, seed=self.recipe.seed)

    def _open_evaluation(self) -> Evaluation | None:
        if self.recipe.evaluate is None:
            return None
        feed = self._open_feed(self.recipe.eval_dataset)
        return Evaluation(self.replica, feed, self._open_leases, world_size=self.world.size)

    def _open_leases(self, key: str, span: Lease, *, batch_size: int) -> Leases:
        if self.world.size == 1:
            return LocalLeases(span, batch_size=batch_size)
        return StoreLeases(self.world.store, key, span, rank=self.world.rank, batch_size=batch_size)

    # An epoch

    def run_epoch(self, epoch: int) -> EpochMetrics:
        order = self._order(epoch)
        self.feed.start_epoch(order, epoch)
        self.samples, self.blocked_s = 0, []
        self.world.barrier(f"the start of epoch {epoch}")
        started_s = time.perf_counter()
        self._first_epoch_s = self._first_epoch_s or started_s
        for batch in Lease(0, len(order)).batches(self.recipe.batch_size):
            self._step(epoch, batch)
        self._wait_for_device()
        metrics = self._conclude(epoch, time.perf_counter() - started_s)
        self.history.append(metrics)
        if self.world.rank == 0:
            self._write_record(status="running")
        return metrics

    def _order(self, epoch: int) -> Tensor:
        num_samples = self.feed.num_samples
        order = (
            shuffled(num_samples, seed=self.recipe.seed, epoch=epoch) if self.recipe.shuffle else in_order(num_samples)
        )
        return dealt(order, rank=self.world.rank, world_size=self.world.size)

    def _step(self, epoch: int, batch: Batch) -> None:
        with self.throttle:
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            data = self.feed.fetch(batch)
            self.replica.optimizer.zero_grad(set_to_none=True)
            with self.replica.autocast():
                loss = self.recipe.step(self.model, data)
            loss.backward()
            self.replica.update(at=epoch * self.feed.num_samples + batch.start * self.world.size)
            self.replica.tally.add(loss, batch.count, self.replica.steps)
            # A rank that waits for others uses no CPU time: what is missing from the wall time was waiting.
            self.blocked_s.append((time.perf_counter() - wall_s) - (time.thread_time() - cpu_s))
        self.samples += batch.count
        self._tell_progress(epoch)

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
            loss=self.replica.tally.mean_so_far() if self.world.device.type == "cpu" else None,
        )

    # What is known of it

    def _conclude(self, epoch: int, seconds: float) -> EpochMetrics:
        evaluating_s = time.perf_counter()
        evaluated = self._evaluate(epoch)
        account = self._account(evaluated, seconds=seconds, eval_s=time.perf_counter() - evaluating_s)
        accounts = [RankAccount(**fields) for fields in self.world.exchange_json(asdict(account))]
        # Decided from what all ranks told, so that all leave together.
        self.is_stopped = any(one.wants_stop for one in accounts)
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

    def _evaluate(self, epoch: int) -> Evaluated:
        if self.evaluation is None:
            return Evaluated()
        # Rank 0's BatchNorm statistics are the model's; the others get them at their next forward pass only.
        for buffer in self.replica.model.buffers():
            dist.broadcast(buffer, src=0, group=self.group)
        return self.evaluation.run(f"eval/{epoch}")

    def _account(self, evaluated: Evaluated, *, seconds: float, eval_s: float) -> RankAccount:
        loss_sum, loss_samples = self.replica.tally.drain()
        cost_s = self._average_cost_s()
        return RankAccount(
            loss_sum=loss_sum,
            loss_samples=loss_samples,
            eval_sum=evaluated.total,
            eval_samples=evaluated.samples,
            samples=self.samples,
            logged=self.replica.logbook.drain(),
            averages=len(self.blocked_s),
            average_cost_s=cost_s,
            wait_s=sum(self.blocked_s) - cost_s,
            seconds=seconds,
            eval_s=eval_s,
            wants_stop=self.link.stop_requested.is_set(),
        )

    def _average_cost_s(self) -> float:
        """In each step the rank blocked least waited for nobody; on a GPU the host's clocks cannot tell."""
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
                "policy": POLICY,
                "backend": self.setting.backend,
                "devices": self.setting.devices,
                "num_samples": self.feed.num_samples,
                "options": self.options,
                "environment": environment(),
                "commit": self.commit,
                "epochs": epochs,
                "totals": totals(epochs),
            },
        )

    def finish(self) -> None:
        """Leave the model and the record behind."""
        if self.world.rank == 0:
            self.folder.write_model(self.replica.model.state_dict())
            self._write_record(status="stopped" if self.is_stopped else "finished")
        self.world.barrier("the end of the run")
