"""`train()`: one call that trains a model on all devices and returns a handle at once.

Decides whether this process starts the ranks or is one of them. `launch` starts ranks, and `rank` trains in each.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Unpack

from outrider.api.handle import AdoptedRun, Run, StartedRun
from outrider.api.options import CheckedRun, Options, make_order, overridden
from outrider.api.replay_wish import wanted_replay
from outrider.api.run_talk import RunTalk
from outrider.average.transport.backend_table import choose_backend
from outrider.data.feed import open_dataset
from outrider.data.loading import LoadedData
from outrider.data.tensor_table import as_table
from outrider.launch.forkserver import TRAINING
from outrider.launch.interruption import SignalGuard, is_interruption
from outrider.launch.launcher import launch
from outrider.launch.ranks import Ranks
from outrider.launch.script_launcher import running_script
from outrider.machine.devices import DeviceSpec, cuda_devices, num_cores, resolve_devices, threads_per_rank
from outrider.machine.rank_environments import (
    have_same_torch,
    rank_pythons,
    refuse_other_python,
    tell_unused_environments,
    wanted_environments,
)
from outrider.rank.agreement import compare, options_to_compare
from outrider.rank.entry import run_rank
from outrider.rank.rank_life import RunSetting, check_num_samples
from outrider.rank.train_run import train_rank
from outrider.record import checkpoint, checkpoint_files
from outrider.record import run_config as configs
from outrider.record.epoch_metrics import EpochMetrics
from outrider.record.run_config import RunConfig
from outrider.record.run_folder import SCHEMA_VERSION, RunFolder, new_folder
from outrider.record.run_folder_lock import FolderLock
from outrider.record.run_record import close_record
from outrider.record.run_timeline import complete_timeline
from outrider.replica import recipe as recipes
from outrider.replica.recipe import ModelSource, OptimizerFactory, Recipe, StepFunction
from outrider.replica.run_identity import identity_of
from outrider.timeline.sampler import SampledProcess, Sampler
from outrider.trackers.tracker import refuse_missing
from outrider.trackers.tracker_names import make_trackers
from outrider.watch.watch_child import open_page, wants_page
from outrider.world.default_group import existing_ranks
from outrider.world.environment import Environment, local_devices, tell_unused_port, wanted_devices
from outrider.world.environment import is_trial as is_trial_wanted
from outrider.world.messages import Link, Message, adopted_link
from outrider.world.rank_errors import as_ours
from outrider.world.world import World

_RUNS = "runs"


def train(
    model: ModelSource,
    optimizer: OptimizerFactory,
    step: StepFunction,
    dataset: Any,
    **options: Unpack[Options],
) -> Run:
    """Train one model on all devices; returns at once with a handle.

    `model` is a module or a function that returns one, `optimizer` a function from parameters to an optimizer, and
    `step(model, batch)` returns the mean loss of the batch. Under torchrun and similar launchers this process is one
    of the ranks and trains while you iterate or join the handle; otherwise one process per device is started.
    """
    required = {"model": model, "optimizer": optimizer, "step": step, "dataset": dataset}
    order = make_order(required, overridden(options))
    if (wish := wanted_replay()) is not None:
        # Imported here, so that the lab is loaded only for a replay.
        from outrider.api.replaying import replay_instead

        replay_instead(order, wish)
    return start(order, talk=RunTalk.open(order.config.quiet))


def start(
    order: CheckedRun,
    *,
    on_message: Callable[[Message], None] = lambda message: None,
    talk: RunTalk | None = None,
    is_trial: bool = False,
) -> Run:
    """Start the run, or join it under torchrun; `on_message` receives progress messages during waits on the handle.

    Without `talk` the run prints nothing. A trial is measured for a few seconds and saves no model and no checkpoint.
    """
    environment = existing_ranks()
    if environment is not None:
        tell_unused_port(environment, order.config.port)
        if environment.rank == 0:
            tell_unused_environments(order.config.environments, "the ranks were started by another program")
        return _adopt(order, environment, talk if talk is not None and environment.rank == 0 else RunTalk())
    if not is_trial:
        # A trial names its own devices in the options.
        wanted = wanted_devices(order.config.devices)
        order = replace(
            order, config=replace(order.config, devices=wanted if isinstance(wanted, str) else tuple(wanted))
        )
    return _start(order, on_message, talk or RunTalk(), is_trial=is_trial or is_trial_wanted())


def _start(order: CheckedRun, on_message: Callable[[Message], None], talk: RunTalk, *, is_trial: bool) -> Run:
    """Start the ranks; a signal that arrives meanwhile is handled once there is a handle that can stop them."""
    received: list[signal.Signals] = []
    with SignalGuard(received.append):
        run = _start_ranks(order, on_message, talk, is_trial=is_trial)
    if received:
        run.receive(received[0])
    return run


def _start_ranks(
    order: CheckedRun, on_message: Callable[[Message], None], talk: RunTalk, *, is_trial: bool
) -> StartedRun:
    resolved = resolve_devices(order.config.devices, cuda_devices=cuda_devices())
    pythons = rank_pythons(wanted_environments(order.config.environments), resolved.devices)
    if pythons is not None:
        refuse_other_python(pythons)
    choice = choose_backend(
        order.config.backend, resolved.devices, has_one_torch=pythons is None or have_same_torch(pythons)
    )
    if pythons is None:
        for tracker in make_trackers(order.config.trackers):
            refuse_missing(tracker)
    has_page = wants_page(order.config.watch)
    devices = tuple(str(spec) for spec in resolved.devices)
    order = replace(order, recipe=order.recipe.with_devices(devices))
    _check(order, world_size=len(devices))
    reasons = {"devices": resolved.reason, "backend": choice.reason}
    with _folder_of(order) as folder:
        setting = RunSetting(
            folder=folder.path, origin_s=time.time(), backend=choice.backend, devices=devices, is_trial=is_trial
        )
        config_json = _config_json(order, devices=devices, backend=choice.backend, reasons=reasons)
        ranks = launch(
            run_rank,
            _payload(order, setting),
            devices=resolved.devices,
            log_dir=folder.path,
            port=order.config.port,
            imports=TRAINING,
            interpreters=None if pythons is None else [one.interpreter for one in pythons],
            num_threads=order.config.threads_per_rank,
            on_end=_open_folder(folder, order, config_json).release,
            timeout_s=order.config.timeout_s,
            grace_s=order.config.grace_s,
        )
    sampler = make_sampler(order, ranks, resolved.devices, origin_s=setting.origin_s, folder=folder.path)
    talk.introduce(devices, policy=order.policy_words, folder=folder.path)
    page = open_page(folder.path) if has_page else None
    talk.await_ranks(devices)
    return StartedRun(
        ranks,
        folder,
        on_message=on_message,
        talk=talk,
        sampler=sampler,
        page=page,
        grace_s=order.config.grace_s,
    )


def make_sampler(
    order: CheckedRun, ranks: Ranks, devices: Sequence[DeviceSpec], *, origin_s: float, folder: Path | None = None
) -> Sampler | None:
    """Return the sampler of device utilization, or None if it is switched off."""
    if not order.config.sample_utilization:
        return None
    num_threads = order.config.threads_per_rank
    threads = threads_per_rank(devices, num_cores()) if num_threads is None else (num_threads,) * len(devices)
    workers = [
        SampledProcess(rank=rank, device=str(spec), pid=pid, num_threads=threads[rank])
        for rank, (spec, pid) in enumerate(zip(devices, ranks.pids, strict=True))
    ]
    return Sampler(workers, origin_s=origin_s, is_over=lambda: not ranks.is_running, folder=folder)


def _check(order: CheckedRun, *, world_size: int) -> None:
    """Check the options before any process starts; ranks check data sets that functions return."""
    order.recipe.check_ranks(world_size)
    order.recipe.planner_config(world_size, batch_size=order.recipe.mean_batch_size)
    newest = _newest_checkpoint(order.config)
    if newest is not None:
        checkpoint.load_progress(newest, identity=identity_of(order.recipe))
    known = _num_samples(order)
    if known is not None:
        check_num_samples(known, world_size=world_size)


def _num_samples(order: CheckedRun) -> int | None:
    """The number of samples in an epoch; None if only the ranks know it."""
    recipe = order.recipe
    dataset = recipe.dataset.dataset if isinstance(recipe.dataset, LoadedData) else recipe.dataset
    if recipe.length is not None or callable(dataset):
        return recipe.length
    opened = open_dataset(dataset)
    table = as_table(opened)
    return len(opened if table is None else table) if recipe.order is None else None


def _newest_checkpoint(config: RunConfig) -> Path | None:
    if config.resume == "auto":
        assert config.run_dir is not None, "checked with the options"
        return next(iter(checkpoint_files.whole(config.run_dir)), None)
    return None if config.resume is None else checkpoint_files.find(Path(config.resume))[0]


@contextmanager
def _folder_of(order: CheckedRun) -> Iterator[RunFolder]:
    """The run folder; a new folder is removed again if the run cannot be started."""
    wanted = order.config.run_dir
    was_there = wanted is not None and wanted.exists()
    folder = RunFolder(wanted or _new_run_dir(order))
    try:
        yield folder
    except BaseException:
        if not was_there:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def _open_folder(folder: RunFolder, order: CheckedRun, config_json: dict[str, Any]) -> FolderLock:
    """Lock the folder until the end of the run and write the configuration into it."""
    checkpoint.refuse_strangers(folder, resume=order.config.resume)
    lock = FolderLock.take(folder)
    try:
        folder.write_json("config.json", config_json)
    except BaseException:
        lock.release()
        raise
    return lock


def _payload(order: CheckedRun, setting: RunSetting) -> dict[str, Any]:
    """Split the payload into named parts, so that an error can name the part that cannot be pickled."""
    recipe, config = order.recipe, order.config
    objects = {name: getattr(recipe, name) for name in sorted(recipes.SENT_BY_NAME)}
    objects |= {name: getattr(config, name) for name in sorted(configs.SENT_BY_NAME)}
    return {
        "settings": {name: value for name, value in recipes.plain(recipe).items() if name not in objects},
        "run_settings": {name: value for name, value in configs.plain(config).items() if name not in objects},
        "setting": setting,
        **{name: value for name, value in objects.items() if value is not None},
    }


def _adopt(order: CheckedRun, environment: Environment, talk: RunTalk) -> Run:
    specs = local_devices(environment, wanted_devices(order.config.devices), cuda_devices=cuda_devices())
    _check(order, world_size=environment.world_size)
    wants_page(order.config.watch)
    link = adopted_link(environment, devices=specs, num_threads=order.config.threads_per_rank, on_message=talk.saw)
    # Without run_dir, rank 0 chooses a name once the ranks have joined.
    folder = RunFolder(order.config.run_dir or Path.cwd() / _RUNS)
    return AdoptedRun(_train_here(order, link, folder, talk), link, folder, talk=talk)


def _train_here(order: CheckedRun, link: Link, folder: RunFolder, talk: RunTalk) -> Generator[EpochMetrics]:
    with World.join(link, timeout_s=order.config.timeout_s) as world:
        compare(world, world.exchange_json(options_to_compare(order.recipe, order.config), name="options"))
        choice = choose_backend(order.config.backend, world.specs, hosts=world.hosts, has_one_torch=world.has_one_torch)
        devices = tuple(str(spec) for spec in world.specs)
        order = replace(order, recipe=order.recipe.with_devices(devices))
        wanted = order.config.run_dir or (_new_run_dir(order) if world.rank == 0 else "")
        shared = world.exchange_json({"folder": str(wanted), "origin_s": time.time()}, name="run folders")[0]
        folder.path = Path(shared["folder"])
        talk.introduce(devices, policy=order.policy_words, folder=folder.path)
        with contextlib.ExitStack() as stack:
            if world.rank == 0:
                reasons = {"devices": "of the ranks that were there", "backend": choice.reason}
                config_json = _config_json(order, devices=devices, backend=choice.backend, reasons=reasons)
                stack.callback(_open_folder(folder, order, config_json).release)
                if wants_page(order.config.watch):
                    stack.enter_context(open_page(folder.path))
            setting = RunSetting(
                folder=folder.path, origin_s=shared["origin_s"], backend=choice.backend, devices=devices
            )
            with _recorded_end(link, folder):
                yield from train_rank(link, order.recipe, order.config, world=world, setting=setting)
    if link.rank == 0:
        complete_timeline(folder.path)
        if link.interrupted_by is None:
            talk.end(folder.path)


@contextmanager
def _recorded_end(link: Link, folder: RunFolder) -> Iterator[None]:
    """Without a starter, rank 0 records a failure or interruption itself; other errors are converted to ours."""
    try:
        yield
    except BaseException as error:
        told = as_ours(error, link)
        if link.rank == 0:
            ended = "interrupted" if is_interruption(error, link) else "closed"
            close_record(folder, status="failed" if told else ended, error=told)
            complete_timeline(folder.path)
        if told is None or told is error:
            raise
        raise told from error


def _config_json(
    order: CheckedRun, *, devices: tuple[str, ...], backend: str, reasons: dict[str, str]
) -> dict[str, Any]:
    names = {name: _name_of(getattr(order.recipe, name)) for name in sorted(recipes.OBJECTS)}
    names |= {name: _name_of(getattr(order.config, name)) for name in sorted(configs.OBJECTS)}
    return {
        "schema_version": SCHEMA_VERSION,
        "devices": devices,
        "backend": backend,
        "reasons": reasons,
        # A notebook or a test is not a program that can be run again.
        "program": {"arguments": sys.orig_argv[1:] if running_script() else [], "folder": str(Path.cwd())},
        "options": recipes.settings(order.recipe) | configs.settings(order.config) | _batching(order.recipe),
        "objects": names,
    }


def _batching(recipe: Recipe) -> dict[str, Any]:
    """Options for batches of a batch sampler, whose sizes only the ranks know; they write them into the record."""
    name = recipe.batch_sampler
    return {} if name is None else {"batch_size": None, "batch_sampler": {"name": name}}


def _name_of(thing: object) -> str | None:
    if thing is None:
        return None
    return getattr(thing, "__qualname__", type(thing).__qualname__)


def _new_run_dir(order: CheckedRun) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return new_folder(Path.cwd() / _RUNS, f"{stamp}-{order.recipe.policy_spec.name}")
