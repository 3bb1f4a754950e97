"""One mode of one task, run in processes of its own, and the summary of what it reached.

Decides what the names of modes mean and how epochs become a summary; how ranks train is the runtime's or a peer's.
Called by the demo and the benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.api.options import Order, make_order
from outrider.api.train import start
from outrider.bench.peers.ddp import start_ddp
from outrider.bench.tasks import Task
from outrider.errors import ConfigError, nearest
from outrider.machine.devices import DeviceSpec, num_cores, threads_per_rank
from outrider.runtime.messages import Message
from outrider.runtime.metrics import EpochMetrics

TRAINED_POLICIES = ("sync", "balanced", "cadence", "async")
INDEPENDENT = "independent"
DDP = "ddp"

OnMessage = Callable[[Message], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """What the name of a mode asks for.

    `solo-N` is the N-th device alone; `ddp` is torch's; `cpu-cadence` is a policy on a backend and `cadence` the same
    on the backend that fits; `independent` is all devices without averaging: the ceiling, not a way to train.
    `balanced` takes the task's batch for the whole world, so that it learns exactly as the solos do; in all other
    modes every rank has a batch of that size of its own.
    """

    name: str
    policy: str
    backend: str = "auto"
    solo_rank: int | None = None


def parse_mode(name: str, *, num_devices: int) -> Mode:
    """The mode of this name in a world of that many devices."""
    if name == DDP:
        return Mode(name=name, policy=DDP)
    solos = [f"solo-{rank}" for rank in range(num_devices)]
    if name in solos:
        return Mode(name=name, policy=INDEPENDENT, solo_rank=solos.index(name))
    backend, dash, policy = name.rpartition("-")
    if policy in TRAINED_POLICIES and (not dash or backend in ("cpu", "nccl")):
        return Mode(name=name, policy=policy, backend=backend or "auto")
    if name == INDEPENDENT:
        return Mode(name=name, policy=INDEPENDENT)
    valid = [*solos, DDP, INDEPENDENT, *(f"{kind}-{policy}" for kind in ("cpu", "nccl") for policy in TRAINED_POLICIES)]
    close = nearest(name, valid)
    raise ConfigError(
        f"no mode is called {name!r} for {num_devices} device{'' if num_devices == 1 else 's'}",
        hint=f"did you mean {close!r}?" if close else f"modes are {', '.join(valid)}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeResult:
    """A mode that ran to its end."""

    mode: str
    epochs: tuple[EpochMetrics, ...]
    run_dir: Path


def run_mode(
    mode: Mode,
    task: Task,
    *,
    devices: Sequence[DeviceSpec],
    run_dir: Path,
    on_message: OnMessage = lambda message: None,
) -> ModeResult:
    """Train in new processes and wait for the end; interrupted, it leaves none of them behind."""
    order = make_mode_order(mode, task, devices=devices, run_dir=run_dir)
    begin = start_ddp if mode.policy == DDP else start
    with begin(order, on_message=on_message) as run:
        trained = run.join()
    return ModeResult(mode=mode.name, epochs=trained.epochs, run_dir=trained.run_dir)


def make_mode_order(mode: Mode, task: Task, *, devices: Sequence[DeviceSpec], run_dir: Path) -> Order:
    """The order of a run of `train()`; a solo gets the threads that its rank has in the whole world."""
    options: dict[str, Any] = {
        "batch_size": task.batch_size,
        "epochs": task.epochs,
        "seed": task.seed,
        "policy": "sync" if mode.policy == DDP else mode.policy,
        "backend": mode.backend,
        "devices": [str(spec) for spec in devices],
        "run_dir": run_dir,
    }
    if mode.solo_rank is not None:
        options["devices"] = [str(devices[mode.solo_rank])]
        options["threads_per_rank"] = threads_per_rank(devices, num_cores())[mode.solo_rank]
    if _ends_as_one_model(mode):
        options |= {"evaluate": task.evaluate, "eval_dataset": task.eval_dataset}
    required = {"model": task.model, "optimizer": task.optimizer, "step": task.step, "dataset": task.dataset}
    return make_order(required, options)


def _ends_as_one_model(mode: Mode) -> bool:
    """Ranks that never average have each their own model: there is nothing to evaluate."""
    return mode.policy != INDEPENDENT or mode.solo_rank is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a mode reached; speeds are of training time after the warm-up, None is not known."""

    samples_per_s: float
    efficiency: float | None
    """Against the ideal, the sum of the solos."""
    speedup: float | None
    """Against solo-0."""
    eval: float | None
    time_to_target_s: float | None
    """Training time, warm-up included, up to the end of the first epoch whose evaluation reached the target."""
    averages: int
    exposed_average_fraction: float | None
    wait_fraction: float | None
    run_dir: Path


def ideal_samples_per_s(results: Mapping[str, ModeResult], *, num_devices: int) -> float | None:
    """The sum of the solos; None where one is missing."""
    solos = [results.get(f"solo-{rank}") for rank in range(num_devices)]
    speeds = [samples_per_s(solo.epochs) for solo in solos if solo is not None]
    return sum(speeds) if len(speeds) == num_devices else None


def summarise(result: ModeResult, *, ideal: float | None, solo: float | None, target: float | None) -> Summary:
    """`ideal` and `solo` are samples per second of all solos together and of solo-0."""
    speed = samples_per_s(result.epochs)
    return Summary(
        samples_per_s=speed,
        efficiency=speed / ideal if ideal else None,
        speedup=speed / solo if solo else None,
        eval=result.epochs[-1].eval,
        time_to_target_s=time_to_target_s(result.epochs, target),
        averages=sum(epoch.averages for epoch in result.epochs),
        exposed_average_fraction=_mean_over_time(result.epochs, "exposed_average_fraction"),
        wait_fraction=_mean_over_time(result.epochs, "wait_fraction"),
        run_dir=result.run_dir,
    )


def after_warm_up(epochs: Sequence[EpochMetrics]) -> Sequence[EpochMetrics]:
    """All but the first epoch, in which caches fill and the planner learns the paces; a single epoch stays."""
    return epochs[1:] if len(epochs) > 1 else epochs


def samples_per_s(epochs: Sequence[EpochMetrics]) -> float:
    counted = after_warm_up(epochs)
    return sum(epoch.samples for epoch in counted) / sum(epoch.seconds for epoch in counted)


def time_to_target_s(epochs: Sequence[EpochMetrics], target: float | None) -> float | None:
    if target is None:
        return None
    return next((epoch.train_s for epoch in epochs if epoch.eval is not None and epoch.eval >= target), None)


def _mean_over_time(epochs: Sequence[EpochMetrics], name: str) -> float | None:
    counted = after_warm_up(epochs)
    mean = sum(getattr(epoch, name) * epoch.seconds for epoch in counted) / sum(epoch.seconds for epoch in counted)
    return None if math.isnan(mean) else mean
