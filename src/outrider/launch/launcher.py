"""Starts one process per device on this host and returns the Ranks object that watches them.

Decides the setup of a rank's process: interpreter, variables, pipes, log, payload. Does not decide what the rank
computes. A failed start is undone completely. Called by `api` when no ranks exist yet.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from outrider.errors import ConfigError
from outrider.launch.forkserver import Forkserver, ProcessSetup, forkserver_for
from outrider.launch.payload import library_folders, write_payload
from outrider.launch.rank_main import BOOT
from outrider.launch.rank_process import Process, RankProcess
from outrider.launch.ranks import Ranks
from outrider.machine.devices import (
    CARD_ORDER,
    DeviceSpec,
    num_cores,
    threads_alone,
    threads_per_rank,
    variables_for_limits,
)
from outrider.slices.mps import slices
from outrider.store.store_process import free_port, serve_in_private_folder
from outrider.world.environment import Environment, launched

__all__ = ["Ranks", "launch"]

_HOST = "127.0.0.1"
_STDOUT, _STDERR = 1, 2


def launch(
    target: Callable[..., None],
    payload: Mapping[str, object],
    *,
    devices: Sequence[DeviceSpec],
    log_dir: Path,
    port: int = 0,
    environment: Mapping[str, str] | None = None,
    imports: Sequence[str] = (),
    interpreters: Sequence[str] | None = None,
    num_threads: int | None = None,
    shown_rank: int | None = None,
    timeout_s: float | None = None,
    grace_s: float = 0.0,
    on_end: Callable[[], None] = lambda: None,
) -> Ranks:
    """Run `target(link, **payload)` in one new process per device.

    `environment` is added to the variables of all ranks. `imports` are modules that all ranks need; a forkserver
    imports them once if possible. `interpreters` gives each rank its own Python. `num_threads` is per rank; by default
    the ranks divide the cores. Slices of a GPU get a private MPS daemon that ends with the ranks. `shown_rank` writes
    to the output of this process instead of a log. A training rank that is silent for `timeout_s` is considered hung.
    Ranks that a signal interrupts get `grace_s` for an orderly stop. `on_end` is called when all ranks have ended.
    """
    _check_not_in_rank()
    variables = {**(environment or {}), **variables_for_limits(devices)}
    orders = _orders(devices, interpreters=interpreters, variables=variables, log_dir=log_dir, num_threads=num_threads)
    # Start the forkserver first, because it imports in parallel with the following preparations.
    forkserver = forkserver_for(imports=imports, environment=_common_variables(variables))
    orders = [replace(order, is_shown=order.rank == shown_rank) for order in orders]
    with ExitStack() as cleanup:
        cleanup.callback(on_end)
        folder = Path(tempfile.mkdtemp(prefix=f"outrider-{os.getpid()}-"))
        remove_folder = partial(shutil.rmtree, folder, ignore_errors=True)
        cleanup.callback(remove_folder)
        write_payload(folder / "payload", target, payload)
        # This is not the store's port: MASTER_PORT is for process groups that the user's code opens.
        port = free_port(_HOST, port)
        store = serve_in_private_folder(remove=[str(folder)])
        cleanup.callback(store.close)
        meeting = _Meeting(port=port, store=store.address)
        own = cleanup.enter_context(slices(devices))
        orders = [replace(order, variables={**order.variables, **own[order.rank]}) for order in orders]
        processes = _start_all(orders, folder=folder, meeting=meeting, forkserver=forkserver)
        ranks = Ranks(
            processes,
            on_all_started=remove_folder,
            on_end=cleanup.pop_all().close,
            timeout_s=timeout_s,
            grace_s=grace_s,
        )
    ranks.begin_watching()
    return ranks


def _check_not_in_rank() -> None:
    here = launched()
    if here is not None:
        raise ConfigError(
            f"ranks cannot be started from inside rank {here.rank}",
            hint='put the call under `if __name__ == "__main__":` in the module that the ranks import',
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Meeting:
    """The rendezvous of the ranks: our store, and the port for the user's own process groups."""

    port: int
    store: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _StartOrder:
    """The settings for starting one rank."""

    rank: int
    world_size: int
    spec: DeviceSpec
    num_threads: int
    num_threads_alone: int
    interpreter: str
    variables: Mapping[str, str]
    log_path: Path
    is_shown: bool = False
    """Whether the rank writes to the terminal of the starter instead of its log."""


def _orders(
    devices: Sequence[DeviceSpec],
    *,
    interpreters: Sequence[str] | None,
    variables: Mapping[str, str],
    log_dir: Path,
    num_threads: int | None,
) -> list[_StartOrder]:
    if interpreters is not None and len(interpreters) != len(devices):
        raise ConfigError(
            f"{len(interpreters)} interpreters given for {len(devices)} devices",
            hint="give one interpreter per device, or leave interpreters out",
        )
    programs = interpreters or [sys.executable] * len(devices)
    given = None if num_threads is None else (num_threads,) * len(devices)
    threads = given or threads_per_rank(devices, num_cores())
    alone = given or threads_alone(devices, num_cores())
    return [
        _StartOrder(
            rank=rank,
            world_size=len(devices),
            spec=spec,
            num_threads=threads[rank],
            num_threads_alone=alone[rank],
            interpreter=programs[rank],
            variables=variables,
            log_path=log_dir / f"rank{rank}.log",
        )
        for rank, spec in enumerate(devices)
    ]


def _start_all(
    orders: Sequence[_StartOrder], *, folder: Path, meeting: _Meeting, forkserver: Forkserver | None
) -> list[RankProcess]:
    processes: list[RankProcess] = []
    try:
        for order in orders:
            processes.append(_start(order, folder=folder, meeting=meeting, forkserver=forkserver))
    except BaseException:
        for process in processes:
            process.close()
        raise
    return processes


def _start(order: _StartOrder, *, folder: Path, meeting: _Meeting, forkserver: Forkserver | None) -> RankProcess:
    with ExitStack() as on_failure, ExitStack() as ends_of_rank:
        messages_fd, rank_messages_fd = os.pipe()
        rank_control_fd, control_fd = os.pipe()
        for descriptor in (messages_fd, control_fd):
            on_failure.callback(os.close, descriptor)
        for descriptor in (rank_messages_fd, rank_control_fd):
            ends_of_rank.callback(os.close, descriptor)
        start_path = folder / f"rank{order.rank}.json"
        start = _start_file(order, folder=folder, messages_fd=rank_messages_fd, control_fd=rank_control_fd)
        start_path.write_text(json.dumps(start))
        log = None if order.is_shown else ends_of_rank.enter_context(_open_log(order.log_path))
        setup = ProcessSetup(
            start_path=str(start_path),
            environment=_common_variables(order.variables) | _environment(order, meeting).variables(),
            folder=os.getcwd(),
            messages_fd=rank_messages_fd,
            control_fd=rank_control_fd,
            stdout_fd=_STDOUT if log is None else log.fileno(),
            stderr_fd=_STDERR if log is None else log.fileno(),
        )
        is_ours = order.interpreter == sys.executable
        forked = forkserver.fork(setup) if forkserver is not None and is_ours else None
        process = forked or _spawned(order, setup)
        on_failure.pop_all()
    return RankProcess(
        rank=order.rank,
        spec=order.spec,
        process=process,
        messages_fd=messages_fd,
        control_fd=control_fd,
        log_path=order.log_path,
    )


def _start_file(order: _StartOrder, *, folder: Path, messages_fd: int, control_fd: int) -> dict[str, Any]:
    """The settings that BOOT and main() of the child read before the payload."""
    return {
        "path": _carried_path(order.interpreter),
        "argv": sys.argv,
        "folder": str(folder),
        "device": str(order.spec),
        "num_threads": order.num_threads,
        "num_threads_alone": order.num_threads_alone,
        "is_shown": order.is_shown,
        "messages_fd": messages_fd,
        "control_fd": control_fd,
        # The kernel sends the signal when the starting thread ends, so only the main thread may request it.
        "dies_with_starter": threading.current_thread() is threading.main_thread(),
    }


def _carried_path(interpreter: str) -> list[str]:
    """This program's sys.path; for another interpreter, without the libraries of this interpreter."""
    if interpreter == sys.executable:
        return list(sys.path)
    libraries = library_folders()
    return [entry for entry in sys.path if not os.path.join(entry, "").startswith(libraries)]


def _open_log(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "wb")
    except OSError as error:
        raise ConfigError(
            f"log {path} cannot be written: {error.strerror}",
            hint="pass a run_dir on a disk with room where you may write",
        ) from error


def _spawned(order: _StartOrder, setup: ProcessSetup) -> Process:
    try:
        return subprocess.Popen(
            [order.interpreter, "-c", BOOT, setup.start_path],
            stdin=subprocess.DEVNULL,
            stdout=setup.stdout_fd,
            stderr=setup.stderr_fd,
            cwd=setup.folder,
            env=dict(setup.environment),
            pass_fds=(setup.messages_fd, setup.control_fd),
            # Ctrl-C in the terminal must reach only the starter, which stops the ranks in an orderly way.
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(
            f"rank {order.rank} cannot be started with {order.interpreter}: {error.strerror}",
            hint="give the path of a Python that has outrider installed",
        ) from error


def _common_variables(given: Mapping[str, str]) -> dict[str, str]:
    return {**CARD_ORDER, **os.environ, **given}


def _environment(order: _StartOrder, meeting: _Meeting) -> Environment:
    return Environment(
        rank=order.rank,
        local_rank=order.rank,
        world_size=order.world_size,
        local_world_size=order.world_size,
        master_addr=_HOST,
        master_port=meeting.port,
        store=meeting.store,
    )
