"""Runs one mode of one task in its own processes, and summarises the result.

Decides the meaning of the names of modes, which modes can run on given devices, and how epochs become a summary. `api`
or a peer trains. Called by the demo and the benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.api.handle import Run
from outrider.api.options import CheckedRun, make_order
from outrider.api.train import start
from outrider.average.transport.backend_table import BACKEND_TABLE, choose_backend
from outrider.bench.graph_sync import start_graph_sync
from outrider.bench.measures import mean_over_time, samples_per_s, time_to_target_s
from outrider.bench.peers import peer_table as table
from outrider.bench.peers.peer_table import PEERS
from outrider.bench.suite.setting_options import is_per_rank
from outrider.bench.tasks import Task, rising
from outrider.errors import ConfigError, DeviceError, did_you_mean
from outrider.machine.devices import DeviceSpec, num_cores, threads_per_rank
from outrider.policy.policies import TRAINING_POLICIES, policy_spec
from outrider.record.epoch_metrics import EpochMetrics
from outrider.world.messages import Message

INDEPENDENT = "independent"
GRAPH_SYNC = "graph-sync"
DDP = "ddp"
JOINING_PEERS = (DDP, "dp")

Starter = Callable[..., Run]
"""Starts a run: `starter(order, on_message=...)`."""
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
        return policy_spec(self.policy).averages or self.solo_rank is not None

    @property
    def joins_batches(self) -> bool:
        """Whether one step takes a batch of every rank; `balanced` shares one, all others step each on their own."""
        return policy_spec(self.policy).joins_batches and (self.peer is None or self.peer in JOINING_PEERS)

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
    if policy in TRAINING_POLICIES and (not dash or backend in BACKEND_TABLE):
        return Mode(name=name, policy=policy, backend=backend or "auto")
    if name == INDEPENDENT:
        return Mode(name=name, policy=INDEPENDENT)
    if name == GRAPH_SYNC:
        return Mode(name=name, policy="sync")
    valid = mode_names(num_devices)
    raise ConfigError(
        f"no mode is called {name!r} for {num_devices} device{'' if num_devices == 1 else 's'}",
        hint=did_you_mean(name, valid, otherwise=f"modes are {', '.join(valid)}"),
    )


def mode_names(num_devices: int) -> list[str]:
    """All modes, in the order they are listed in."""
    solos = [f"solo-{rank}" for rank in range(num_devices)]
    policies = [f"{backend}-{policy}" for backend in BACKEND_TABLE for policy in TRAINING_POLICIES]
    return [*solos, INDEPENDENT, GRAPH_SYNC, *policies, *PEERS]


def obstacle(mode: Mode, devices: Sequence[DeviceSpec]) -> str | None:
    """Why a mode cannot run on these devices; None if it can."""
    if mode.peer is not None:
        return table.obstacle(PEERS[mode.peer], devices)
    try:
        choose_backend(mode.backend, devices if mode.solo_rank is None else [devices[mode.solo_rank]])
    except DeviceError as error:
        return error.message.partition(": ")[2]
    return None


def starter_of(mode: Mode) -> Starter:
    """The function that starts a mode, by its name."""
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
    as_published: bool = True,
    on_start: Callable[[], None] = lambda: None,
    on_message: OnMessage = lambda message: None,
    starter: Starter | None = None,
) -> ModeResult:
    """Train in new processes and wait for the end; interrupted, it leaves none of them behind.

    `settings` are options of `train()` set by hand; `as_published` is that of `make_mode_order`; `on_start` is called
    once the run has its folder; `starter` trains instead of the mode's own.
    """
    order = make_mode_order(mode, task, devices=devices, run_dir=run_dir, settings=settings, as_published=as_published)
    with (starter or starter_of(mode))(order, on_message=on_message) as run:
        on_start()
        trained = run.join()
    return ModeResult(mode=mode.name, epochs=trained.epochs, run_dir=trained.run_dir)


def make_mode_order(
    mode: Mode,
    task: Task,
    *,
    devices: Sequence[DeviceSpec],
    run_dir: Path,
    settings: Mapping[str, Any] | None = None,
    as_published: bool = True,
) -> CheckedRun:
    """The order of a run of `train()`; a rank has the same threads in every mode.

    So a solo gets those that its rank has in the whole world, and a rank that works alone takes none of the others.
    `as_published`: with the learning rate and the shortest windows of the published records, not with those that
    `train()` has by default.
    """
    given = settings or {}
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
    if as_published:
        options |= {"lr_scale": "auto", "min_anchor": min(20, given.get("max_anchor", 20))}
    if task.joined_warm_up is not None and mode.joins_batches and "lr_scale" not in given:
        options["lr_scale"] = float(len(devices))
        options["scheduler"] = rising(task.scheduler, len(devices), task.joined_warm_up)
    options |= given
    threads = threads_per_rank(devices, num_cores())
    if len(set(threads)) == 1:
        options.setdefault("threads_per_rank", threads[0])
    if mode.solo_rank is not None:
        options["devices"] = [str(devices[mode.solo_rank])]
        options.setdefault("threads_per_rank", threads[mode.solo_rank])
        options = {name: value for name, value in options.items() if not is_per_rank(name, value)}
    if mode.ends_as_one_model:
        options |= {"evaluate": task.evaluate, "eval_dataset": task.eval_dataset}
    required = {"model": task.model, "optimizer": task.optimizer, "step": task.step, "dataset": task.dataset}
    return make_order(required, options)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The results of a mode; speeds are per training time after the warm-up, None means unknown."""

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
    """The sum of the solos; None if one is missing."""
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
