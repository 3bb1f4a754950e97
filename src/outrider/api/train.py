"""`train()`: one call that trains a model on all devices and returns a handle at once.

Decides whether to start ranks or to be one; everything else is the runtime's.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Unpack

from outrider.api.handle import AdoptedRun, Run, StartedRun, complete_timeline
from outrider.api.options import Options, Order, make_order
from outrider.data.feed import open_dataset
from outrider.data.table import as_table
from outrider.machine.devices import DeviceSpec, cuda_devices, num_cores, resolve_devices, threads_per_rank
from outrider.replica import recipe as recipes
from outrider.replica.recipe import ModelSource, OptimizerFactory, StepFunction
from outrider.runtime import checkpoint
from outrider.runtime import config as configs
from outrider.runtime.entry import run_rank
from outrider.runtime.environment import Environment, adopted, local_devices, wanted_devices
from outrider.runtime.folder import SCHEMA_VERSION, RunFolder, new_folder
from outrider.runtime.launch import launch
from outrider.runtime.messages import Link, Message, adopted_link, as_ours
from outrider.runtime.metrics import EpochMetrics
from outrider.runtime.nursery import TRAINING
from outrider.runtime.rank import RunSetting, check_num_samples, train_rank
from outrider.runtime.ranks import Ranks
from outrider.runtime.record import close_record
from outrider.runtime.world import World, choose_backend
from outrider.timeline.sampler import Sampler, Worker

_RUNS = "runs"


def train(
    model: ModelSource,
    optimizer: OptimizerFactory,
    step: StepFunction,
    dataset: Any,
    **options: Unpack[Options],
) -> Run:
    """Train one model on all devices; returns at once with a handle.

    `model` is a module or a function that makes one, `optimizer` a function from parameters to an optimizer, and
    `step(model, batch)` returns the loss, the mean over the batch. Under torchrun and its like this process is one of
    the ranks and trains while the handle is iterated or joined; otherwise one process per device is started.
    """
    order = make_order({"model": model, "optimizer": optimizer, "step": step, "dataset": dataset}, options)
    return start(order)


def start(order: Order, *, on_message: Callable[[Message], None] = lambda message: None) -> Run:
    """Start what was ordered, or join it; `on_message` sees progress messages as the handle is waited on."""
    environment = adopted()
    if environment is not None:
        return _adopt(order, environment)
    return _start(order, on_message)


def _start(order: Order, on_message: Callable[[Message], None]) -> Run:
    resolved = resolve_devices(wanted_devices(order.config.devices), cuda_devices=cuda_devices())
    choice = choose_backend(order.config.backend, resolved.devices)
    _check(order, world_size=len(resolved.devices))
    devices = tuple(str(spec) for spec in resolved.devices)
    reasons = {"devices": resolved.reason, "backend": choice.reason}
    with _folder_of(order) as folder:
        setting = RunSetting(folder=folder.path, origin_s=time.time(), backend=choice.backend, devices=devices)
        _open_folder(folder, order, _config_json(order, devices=devices, backend=choice.backend, reasons=reasons))
        ranks = launch(
            run_rank,
            _payload(order, setting),
            devices=resolved.devices,
            log_dir=folder.path,
            port=order.config.port,
            imports=TRAINING,
            num_threads=order.config.threads_per_rank,
        )
    sampler = make_sampler(order, ranks, resolved.devices, origin_s=setting.origin_s)
    return StartedRun(ranks, folder, on_message=on_message, sampler=sampler)


def make_sampler(order: Order, ranks: Ranks, devices: Sequence[DeviceSpec], *, origin_s: float) -> Sampler | None:
    """What watches the utilization of the ranks' devices, where it is asked for."""
    if not order.config.sample_utilization:
        return None
    num_threads = order.config.threads_per_rank
    threads = threads_per_rank(devices, num_cores()) if num_threads is None else (num_threads,) * len(devices)
    workers = [
        Worker(rank=rank, device=str(spec), pid=pid, num_threads=threads[rank])
        for rank, (spec, pid) in enumerate(zip(devices, ranks.pids, strict=True))
    ]
    return Sampler(workers, origin_s=origin_s, is_over=lambda: not ranks.is_running)


def _check(order: Order, *, world_size: int) -> None:
    """What can be told before any process starts; what a function makes is looked at by the ranks."""
    order.recipe.planner_config(world_size)
    if order.config.resume is not None:
        path = checkpoint.find(order.config.resume)
        checkpoint.load_progress(path, identity=checkpoint.identity(order.recipe))
    if not callable(order.recipe.dataset):
        dataset = open_dataset(order.recipe.dataset)
        table = as_table(dataset)
        check_num_samples(len(dataset if table is None else table), world_size=world_size)


@contextmanager
def _folder_of(order: Order) -> Iterator[RunFolder]:
    """The run's folder; a run that cannot be started leaves none behind that was not there before."""
    wanted = order.config.run_dir
    was_there = wanted is not None and wanted.exists()
    folder = RunFolder(wanted or _new_run_dir(order))
    try:
        yield folder
    except BaseException:
        if not was_there:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def _open_folder(folder: RunFolder, order: Order, config_json: dict[str, Any]) -> None:
    checkpoint.refuse_strangers(folder, resume=order.config.resume)
    folder.create()
    folder.write_json("config.json", config_json)


def _payload(order: Order, setting: RunSetting) -> dict[str, Any]:
    """Named parts, so that one that cannot be sent is named in the error."""
    recipe, config = order.recipe, order.config
    objects = {name: getattr(recipe, name) for name in sorted(recipes.OBJECTS)}
    objects |= {name: getattr(config, name) for name in sorted(configs.OBJECTS)}
    return {
        "settings": recipes.plain(recipe),
        "run_settings": configs.plain(config),
        "setting": setting,
        **{name: value for name, value in objects.items() if value is not None},
    }


def _adopt(order: Order, environment: Environment) -> Run:
    specs = local_devices(environment, wanted_devices(order.config.devices), cuda_devices=cuda_devices())
    _check(order, world_size=environment.world_size)
    link = adopted_link(environment, devices=specs, num_threads=order.config.threads_per_rank)
    # Without a wish of the user's, rank 0 finds a name once the ranks have met.
    folder = RunFolder(order.config.run_dir or Path.cwd() / _RUNS)
    return AdoptedRun(_train_here(order, link, folder), link, folder)


def _train_here(order: Order, link: Link, folder: RunFolder) -> Generator[EpochMetrics]:
    with World.join(link, timeout_s=order.config.timeout_s) as world:
        choice = choose_backend(order.config.backend, world.specs, hosts=world.hosts)
        devices = tuple(str(spec) for spec in world.specs)
        wanted = order.config.run_dir or (_new_run_dir(order) if world.rank == 0 else "")
        shared = world.exchange_json({"folder": str(wanted), "origin_s": time.time()}, name="run folders")[0]
        folder.path = Path(shared["folder"])
        if world.rank == 0:
            reasons = {"devices": "of the ranks that were there", "backend": choice.reason}
            _open_folder(folder, order, _config_json(order, devices=devices, backend=choice.backend, reasons=reasons))
        setting = RunSetting(folder=folder.path, origin_s=shared["origin_s"], backend=choice.backend, devices=devices)
        with _recorded_end(link, folder):
            yield from train_rank(link, order.recipe, order.config, world=world, setting=setting)
    if link.rank == 0:
        complete_timeline(folder.path)


@contextmanager
def _recorded_end(link: Link, folder: RunFolder) -> Iterator[None]:
    """Where no starter watches, rank 0 records an end that is not the last record's; errors become ours."""
    try:
        yield
    except BaseException as error:
        told = as_ours(error, link)
        if link.rank == 0:
            close_record(folder, status="failed" if told else "closed", error=told)
        if told is None or told is error:
            raise
        raise told from error


def _config_json(order: Order, *, devices: tuple[str, ...], backend: str, reasons: dict[str, str]) -> dict[str, Any]:
    names = {name: _name_of(getattr(order.recipe, name)) for name in sorted(recipes.OBJECTS)}
    names |= {name: _name_of(getattr(order.config, name)) for name in sorted(configs.OBJECTS)}
    return {
        "schema_version": SCHEMA_VERSION,
        "devices": devices,
        "backend": backend,
        "reasons": reasons,
        "options": recipes.settings(order.recipe) | configs.settings(order.config),
        "objects": names,
    }


def _name_of(thing: object) -> str | None:
    if thing is None:
        return None
    return getattr(thing, "__qualname__", type(thing).__qualname__)


def _new_run_dir(order: Order) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return new_folder(Path.cwd() / _RUNS, f"{stamp}-{order.recipe.policy}")
