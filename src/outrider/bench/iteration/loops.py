"""The measured loops: plain torch, torch DDP, and our policies with the driver of real training.

Decides what one iteration is in each: the same work on the same batch. Called by the rank of an iteration benchmark,
which decides number and order.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from outrider.bench.iteration.iteration_plan import IterationPlan
from outrider.bench.iteration.models import Workload
from outrider.policy.batch_splitter import Splitter
from outrider.policy.effects import Batch, Lease, Seat
from outrider.policy.policies import open_policy, policy_spec
from outrider.policy.window_planner import WindowPlanner
from outrider.rank.averages import make_averages
from outrider.rank.device_clock import DeviceClocks
from outrider.rank.driver import Driver, Segment
from outrider.rank.epoch_accounting import open_leases
from outrider.rank.meter import Meter
from outrider.rank.step_choice import decide_execution
from outrider.rank.stepper import Stepper
from outrider.rank.throttle import Throttle
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica
from outrider.timeline.recorder import Recorder
from outrider.world.world import World


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """As PyTorch's own benchmark has it."""
    return torch.optim.SGD(parameters, 1e-3, momentum=0.9, weight_decay=1e-4)


class DeviceStopwatch:
    """Seconds from one finished iteration to the next, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last_s = 0.0
        self.times_s: list[float] = []

    def start(self) -> None:
        self.times_s = []
        self._wait()
        self._last_s = time.perf_counter()

    def lap(self) -> None:
        self._wait()
        now_s = time.perf_counter()
        self.times_s.append(now_s - self._last_s)
        self._last_s = now_s

    def extend_last(self) -> None:
        """Add the time after the last iteration to it; there is none if other ranks took all samples."""
        self._wait()
        if self.times_s:
            self.times_s[-1] += time.perf_counter() - self._last_s

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class TorchLoop:
    """Forward, loss, backward, optimizer, as a page of torch would have it."""

    def __init__(self, model: nn.Module, replica: Replica, batch: Any, throttle: Throttle) -> None:
        self._model = model
        self._replica = replica
        self._batch = batch
        self._throttle = throttle
        self._stopwatch = DeviceStopwatch(replica.device)

    def run(self, iterations: int) -> list[float]:
        self._stopwatch.start()
        for _ in range(iterations):
            with self._throttle:
                self._iterate()
            self._stopwatch.lap()
        return self._stopwatch.times_s

    def _iterate(self) -> None:
        optimizer = self._replica.optimizer
        optimizer.zero_grad(set_to_none=True)
        with self._replica.autocast():
            loss = self._replica.recipe.step(self._model, self._batch)
        loss.backward()
        optimizer.step()

    def close(self) -> None:
        """DDP must be gone before its process group."""
        del self._model


class OutriderLoop:
    """A policy on the driver that trains, with the real averages; only the data is a batch that is there already."""

    def __init__(self, replica: Replica, batch: Any, *, world: World, backend: str, name: str) -> None:
        recipe = replica.recipe
        self._world = world
        self._recipe = recipe
        self._name = name
        self._num_runs = 0
        self._planner = WindowPlanner(recipe.planner_config(world.size, batch_size=recipe.mean_batch_size))
        self._splitter = Splitter(world_size=world.size, shares=None, speed_hints=None)
        self._averages = make_averages(replica, world, backend=backend, verify=False)
        self._averages.start_from_rank_zero()
        self._stopwatch = DeviceStopwatch(world.device)
        feed, recorder = FixedFeed(batch), Recorder(world.rank, origin_s=time.time())
        decide_execution(replica, feed, recorder=recorder, can_overlap=lambda: self._averages.can_overlap)
        clocks = DeviceClocks(world.device) if world.device.type == "cuda" else None
        driver = Driver(
            replica=replica,
            averages=self._averages,
            meter=Meter(rank=world.rank, throttle=Throttle(world.spec.speed), recorder=recorder, clocks=clocks),
            recorder=recorder,
            on_step=self._stopwatch.lap,
        )
        self._feed = feed
        self._stepper = Stepper(driver, replica)

    def run(self, iterations: int) -> list[float]:
        world, recipe = self._world, self._recipe
        spec = recipe.policy_spec
        per_iteration = recipe.mean_batch_size * (1 if spec.batch_is_global else world.size)
        span = Lease(0, iterations * per_iteration)
        policy = open_policy(
            spec,
            Seat(world.rank, world.size, recipe.mean_batch_size),
            span,
            planner=self._planner,
            splitter=self._splitter,
            max_overshoot=recipe.max_overshoot,
        )
        segment = Segment(
            policy=policy,
            span=span,
            leases=open_leases(world, self._next_key(), span, batch_size=recipe.mean_batch_size),
            feed=self._feed,
            seen=0,
            batch_size=recipe.mean_batch_size,
        )
        self._stopwatch.start()
        self._stepper.run(segment)
        if not spec.shares_steps:
            # The last average of a window comes after its last step; after shared steps there is only the epoch's end.
            self._stopwatch.extend_last()
        return self._stopwatch.times_s

    def _next_key(self) -> str:
        self._num_runs += 1
        return f"iteration/{self._name}/{self._num_runs}"

    def close(self) -> None:
        self._averages.close()


class FixedFeed:
    """One batch, on the device, whatever is asked for; of fewer samples where a policy splits it unevenly."""

    def __init__(self, batch: tuple[Tensor, ...]) -> None:
        self.reason = "one batch that is on the device already"
        self._batch = batch

    @property
    def num_samples(self) -> int:
        return len(self._batch[0])

    def start_epoch(self, order: Tensor, epoch: int) -> None: ...

    def announce(self, batches: Iterable[Batch]) -> None: ...

    def fetch(self, batch: Batch) -> Any:
        if batch.count == self.num_samples:
            return self._batch
        # An uneven split may ask for more than one batch: the samples go round.
        rows = torch.arange(batch.count, device=self._batch[0].device) % self.num_samples
        return tuple(part.index_select(0, rows) for part in self._batch)

    def close(self) -> None: ...


IterationLoop = TorchLoop | OutriderLoop


def make_replica(
    workload: Workload, plan: IterationPlan, *, world: World, policy: str = "sync", execution: str = "eager"
) -> Replica:
    """A separate replica for each loop, all from one seed; for torch's own it only holds model and optimizer."""
    recipe = Recipe(
        model=_maker(workload.model, plan),
        optimizer=sgd,
        step=workload.step,
        dataset=(),
        batch_size=policy_spec(policy).batch_size_for(plan.batch_size, world.size),
        policy=policy,
        precision=plan.precision,
        execution=execution,
    )
    return Replica(recipe, device=world.device, rank=world.rank, name=str(world.spec))


def _maker(make: Callable[[], nn.Module], plan: IterationPlan) -> Callable[[], nn.Module]:
    if not plan.is_compiled:
        return make

    def make_compiled() -> nn.Module:
        model = make()
        # In place: parameters keep their names.
        model.compile()
        return model

    return make_compiled


def ddp_model(replica: Replica, plan: IterationPlan, *, world: World, backend: str) -> nn.Module:
    """As PyTorch's own benchmark wraps it: no broadcast of buffers."""
    with warnings.catch_warnings():
        # From torch 2.13 on there is a second option; the first means the same in all that we support.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            replica.model,
            process_group=world.group_for(backend),
            bucket_cap_mb=plan.bucket_mb,
            broadcast_buffers=False,
        )
