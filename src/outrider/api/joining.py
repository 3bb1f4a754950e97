"""Finds or starts the ranks of a session: they exist already, or the script is run again on every device.

Decides whether this process is one of several ranks, the only rank, or the starter of the ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from outrider.api.notebook_bar import in_notebook
from outrider.api.options import CheckedSession
from outrider.average.transport.backend_table import choose_backend
from outrider.errors import ConfigError
from outrider.launch.script_launcher import run_in_ranks, running_script, script_rank
from outrider.machine.devices import DeviceSpec, cuda_devices, resolve_devices
from outrider.machine.rank_environments import (
    have_same_torch,
    rank_pythons,
    tell_unused_environments,
    wanted_environments,
)
from outrider.record.run_folder import RunFolder, new_run_dir
from outrider.record.run_folder_lock import FolderLock
from outrider.slices.slice_check import has_share
from outrider.world.default_group import existing_ranks
from outrider.world.environment import alone, local_devices, tell_unused_port, wanted_devices
from outrider.world.messages import Link, adopted_link


def find_link(order: CheckedSession) -> Link:
    """Return the link of this process as a rank; a process that only starts the ranks exits here."""
    here = script_rank()
    if here is not None:
        return here.link
    environment = existing_ranks()
    num_threads = order.config.threads_per_rank
    wanted = wanted_devices(order.config.devices)
    if environment is not None:
        tell_unused_port(environment, order.config.port)
        if environment.rank == 0:
            tell_unused_environments(order.config.environments, "the ranks were started by another program")
        specs = local_devices(environment, wanted, cuda_devices=cuda_devices())
        return adopted_link(environment, devices=specs, num_threads=num_threads)
    devices = resolve_devices(wanted, cuda_devices=cuda_devices()).devices
    if len(devices) > 1 or not has_share(devices[0]):
        devices = _start_ranks(order, devices, was_asked=wanted != "auto")
    tell_unused_environments(order.config.environments, "a loop on one device runs in the Python that started it")
    return adopted_link(alone(), devices=devices, num_threads=num_threads)


def _start_ranks(order: CheckedSession, devices: Sequence[DeviceSpec], *, was_asked: bool) -> tuple[DeviceSpec, ...]:
    """Run the script once per device and exit with its exit code; a notebook continues with one device.

    A single device also gets its own process if it is a slice of a GPU, because its share is set at process start.
    """
    config = order.config
    pythons = rank_pythons(wanted_environments(config.environments), devices)
    choose_backend(config.backend, devices, has_one_torch=pythons is None or have_same_torch(pythons))
    order.recipe.planner_config(len(devices), batch_size=1)
    script = running_script()
    if script is None:
        return tuple(devices) if len(devices) == 1 else _only_one(devices, was_asked=was_asked)
    _refuse_thread(devices)
    run_dir = config.run_dir or new_run_dir(order.recipe.policy_spec.name)
    sys.stdout.flush()
    # Lock before opening the ranks' logs: these would overwrite the logs of another run in this folder.
    lock = FolderLock.take(RunFolder(run_dir))
    try:
        code = run_in_ranks(
            script,
            devices=devices,
            run_dir=run_dir,
            interpreters=None if pythons is None else [one.interpreter for one in pythons],
            num_threads=config.threads_per_rank,
            port=config.port,
            grace_s=config.grace_s,
        )
    finally:
        lock.release()
    _end_starter(code)


def _refuse_thread(devices: Sequence[DeviceSpec]) -> None:
    if threading.current_thread() is not threading.main_thread():
        names = ",".join(str(spec) for spec in devices)
        raise ConfigError(
            f"a session on {names} runs the script again on each device, and cannot begin that in a thread: "
            "the main thread would go on with a model that nobody trains",
            hint=f"open it in the main thread, or start the script by `outrider run --devices {names} script.py`",
        )


def _end_starter(code: int) -> NoReturn:
    """End this process, whose model was not trained.

    SystemExit would run the script's `finally` and `except` blocks, which may save its model; only the ranks may do so.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def _only_one(devices: Sequence[DeviceSpec], *, was_asked: bool) -> tuple[DeviceSpec, ...]:
    names = ",".join(str(spec) for spec in devices)
    way_out = _way_out(names)
    if was_asked:
        raise ConfigError(
            f"{len(devices)} devices asked for, but there is no script to run on each: a notebook, a "
            "prompt or a test has one device",
            hint=way_out,
        )
    print(f"outrider: {devices[0]} of {len(devices)} devices is used here; to use all: {way_out}", file=sys.stderr)
    return (devices[0],)


def _way_out(names: str) -> str:
    command = f"outrider run --devices {names} script.py"
    if in_notebook():
        return (
            f"begin the cell of the loop with `%%writefile script.py` and run `!{command}` in the next cell, or call "
            "outrider.train(), which starts its ranks from a cell"
        )
    return f"save the loop as a script and run `{command}`, or call outrider.train()"
