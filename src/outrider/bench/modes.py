"""One mode of one task, run in processes of its own, and the summary of what it reached.

Decides what the names of modes mean, which can run on given devices, and how epochs become a summary; how ranks train
is the runtime's or a peer's. Called by the demo and the benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.api.handle import Run
from outrider.api.options import Order, make_order
from outrider.api.train import start
from outrider.bench.graph_sync import start_graph_sync
from outrider.bench.measures import mean_over_time, samples_per_s, time_to_target_s
from outrider.bench.peers import table
from outrider.bench.peers.table import PEERS
from outrider.bench.suite.options import PER_WORLD
from outrider.bench.tasks import Task, rising
from outrider.errors import ConfigError, DeviceError, nearest
from outrider.machine.devices import DeviceSpec, num_cores, threads_per_rank
from outrider.runtime.messages import Message
from outrider.runtime.metrics import EpochMetrics
from outrider.runtime.world import choose_backend

TRAINED_POLICIES = ("sync", "balanced", "cadence", "async")
BACKENDS = ("cpu", "nccl")
INDEPENDENT = "independent"
GRAPH_SYNC = "graph-sync"
DDP = "ddp"
JOINING_PEERS = (DDP, "dp")

Starter = Callable[..., Run]
"""Starts what was ordered: `starter(order, on_message=...)`."""
OnMessage = Callable[[Message], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """What the name of a mode asks for.

    `solo-N` is the N-th device alone; `cpu-cadence` is a policy on a backend and `cadence` the same on the backend that
    fits; `graph-sync` is a flow in a user's own loop; `independent` is all devices without averaging: the ceiling, not
    a way to train; all others are peers.
    `balanced` takes the task's batch for the whole world, so that it learns exactly as the solos do; in all other
    modes every rank has a batch of that size of its own.
    """

    name: str
    policy: str
    backend: str = "auto"
    solo_rank: int | None = None
    peer: str | None = None
    """The name of a peer that trains instead of us."""

    @property
    def ends_as_one_model(self) -> bool:
        """Ranks that never average have each their own model: there is nothing to evaluate."""
        return self.policy != INDEPENDENT or self.solo_rank is not None

    @property
    def joins_batches(self) -> bool:
        """Whether one step takes a batch of every rank; `balanced` shares one, all others step each on their own."""
        return self.policy == "sync" and (self.peer is None or self.peer in JOINING_PEERS)

    @property
    def can_resume(self) -> bool:
        """Peers keep no checkpoints."""
        return self.peer is None


def parse_mode(name: str, *, num_devices: int) -> Mode:
    """The mode of this name in a world of that many devices."""
    solos = [f"solo-{rank}" for rank in range(num_devices)]
    if name in solos:
        return Mode(name=name, policy=INDEPENDENT, solo_rank=solos.index(name))
    if name in PEERS:
        return Mode(name=name, policy="sync", peer=name)
    backend, dash, policy = name.rpartition("-")
    if policy in TRAINED_POLICIES and (not dash or backend in BACKENDS):
        return Mode(name=name, policy=policy, backend=backend or "auto")
    if name == INDEPENDENT:
        return Mode(name=name, policy=INDEPENDENT)
    if name == GRAPH_SYNC:
        return Mode(name=name, policy="sync")
    valid = mode_names(num_devices)
    close = nearest(name, valid)
    raise ConfigError(
        f"no mode is called {name!r} for {num_devices} device{'' if num_devices == 1 else 's'}",
        hint=f"did you mean {close!r}?" if close else f"modes are {', '.join(valid)}",
    )


def mode_names(num_devices: int) -> list[str]:
    """All modes, in the order they are listed in."""
    solos = [f"solo-{rank}" for rank in range(num_devices)]
    policies = [f"{backend}-{policy}" for backend in BACKENDS for policy in TRAINED_POLICIES]
    return [*solos, INDEPENDENT, GRAPH_SYNC, *policies, *PEERS]


def obstacle(mode: Mode, devices: Sequence[DeviceSpec]) -> str | None:
    """Why a mode cannot run on these devices; None where it can."""
    if mode.peer is not None:
        return table.obstacle(PEERS[mode.peer], devices)
    try:
        choose_backend(mode.backend, devices if mode.solo_rank is None else [devices[mode.solo_rank]])
    except DeviceError as error:
        return error.message.partition(": ")[2]
    return None


def starter_of(mode: Mode) -> Starter:
    """The one place where the name of a mode meets the function that starts it."""
    if mode.peer is not None:
        return PEERS[mode.peer].start
    return start_graph_sync if mode.name == GRAPH_SYNC else start


def fits(mode: Mode, model: str) -> bool:
    """Whether a mode can train a model of the suite: `graph-sync` takes those written as a flow."""
    return mode.name != GRAPH_SYNC or model.endswith("-graph")


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
    settings: Mapping[str, Any] | None = None,
    on_start: Callable[[], None] = lambda: None,
    on_message: OnMessage = lambda message: None,
) -> ModeResult:
    """Train in new processes and wait for the end; interrupted, it leaves none of them behind.

    `settings` are options of `train()` set by hand; `on_start` is called once the run has its folder.
    """
    order = make_mode_order(mode, task, devices=devices, run_dir=run_dir, settings=settings or {})
    with starter_of(mode)(order, on_message=on_message) as run:
        on_start()
        trained = run.join()
    return ModeResult(mode=mode.name, epochs=trained.epochs, run_dir=trained.run_dir)


def make_mode_order(
    mode: Mode, task: Task, *, devices: Sequence[DeviceSpec], run_dir: Path, settings: Mapping[str, Any] | None = None
) -> Order:
    """The order of a run of `train()`; a solo gets the threads that its rank has in the whole world."""
    options: dict[str, Any] = {
        "batch_size": task.batch_size,
        "epochs": task.epochs,
        "seed": task.seed,
        "policy": mode.policy,
        "backend": mode.backend,
        "scheduler": task.scheduler,
        "augment": task.augment,
        "max_grad_norm": task.max_grad_norm,
        "devices": [str(spec) for spec in devices],
        "run_dir": run_dir,
    }
    given = settings or {}
    if task.joined_warm_up is not None and mode.joins_batches and "lr_scale" not in given:
        options["lr_scale"] = float(len(devices))
        options["scheduler"] = rising(task.scheduler, len(devices), task.joined_warm_up)
    options |= given
    if mode.solo_rank is not None:
        options["devices"] = [str(devices[mode.solo_rank])]
        options.setdefault("threads_per_rank", threads_per_rank(devices, num_cores())[mode.solo_rank])
        options = {name: value for name, value in options.items() if name not in PER_WORLD}
    if mode.ends_as_one_model:
        options |= {"evaluate": task.evaluate, "eval_dataset": task.eval_dataset}
    required = {"model": task.model, "optimizer": task.optimizer, "step": task.step, "dataset": task.dataset}
    return make_order(required, options)


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
        exposed_average_fraction=mean_over_time(result.epochs, "exposed_average_fraction"),
        wait_fraction=mean_over_time(result.epochs, "wait_fraction"),
        run_dir=result.run_dir,
    )
