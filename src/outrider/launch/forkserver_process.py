"""The forkserver process: imports torch once, forks one rank for every request, and reports how each rank ended.

Decides whether forking is safe at all. In a forked rank, `main` continues with `rank_main`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.launch import rank_main
from outrider.launch.forkserver import HEADER_BYTES, ProcessSetup

IDLE_S = 60.0
"""The forkserver exits after this time without ranks; the next ranks get a new forkserver."""
_NUM_DESCRIPTORS = 5
_IGNORED: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""Signals that this process ignores, each with the default handler for ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _ForkRequest:
    """A request to fork a rank, and the pipe on which its pid and exit status are reported."""

    setup: ProcessSetup
    tells_fd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    pid: int
    tells_fd: int


def main(start: dict[str, Any]) -> None:
    """Serve the starter until it closes the connection; a forked child also continues here and becomes a rank."""
    if start["dies_with_starter"]:
        rank_main.die_with_parent()
    # A batch system signals all processes of a job, but the ranks need this process during their orderly stop.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    for name in start["imports"]:
        importlib.import_module(name)
    # Change the working directory, so that the starter's folder can be removed meanwhile.
    os.chdir("/")
    with socket.socket(fileno=start["socket_fd"]) as starter:
        forked_for = _serve(starter) if _is_fit() else None
    if forked_for is not None:
        rank_main.main(_begin(forked_for))


def _is_fit() -> bool:
    """Whether no import has initialised a GPU; a fork cannot use a GPU that its parent initialised."""
    return not any(target.startswith("/dev/nvidia") for target in map(_target, Path("/proc/self/fd").iterdir()))


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        # The descriptor of the listed folder itself, which is closed by now.
        return ""


def _serve(starter: socket.socket) -> _ForkRequest | None:
    """Serve requests; returns the request in every forked rank, and None in the forkserver when it ends."""
    ranks: dict[int, _Rank] = {}
    poller = select.poll()
    poller.register(starter, select.POLLIN)
    is_open = True
    while is_open or ranks:
        ready = poller.poll(None if ranks else IDLE_S * 1e3)
        if not ready:
            break
        for descriptor, _ in ready:
            if descriptor in ranks:
                poller.unregister(descriptor)
                _bury(ranks.pop(descriptor))
                os.close(descriptor)
            elif (order := _receive(starter)) is None:
                poller.unregister(starter)
                is_open = False
            elif (pid := os.fork()) == 0:
                _leave(ranks)
                return order
            else:
                watched = os.pidfd_open(pid)
                poller.register(watched, select.POLLIN)
                ranks[watched] = _Rank(pid=pid, tells_fd=order.tells_fd)
                _let_go(order, pid)
    return None


def _leave(ranks: Mapping[int, _Rank]) -> None:
    """In a new rank: close the forkserver's descriptors of other ranks."""
    for watched, rank in ranks.items():
        os.close(watched)
        os.close(rank.tells_fd)


def _let_go(order: _ForkRequest, pid: int) -> None:
    """In the forkserver: close the descriptors that now belong to the rank."""
    _tell(order.tells_fd, pid)
    setup = order.setup
    for held in (setup.messages_fd, setup.control_fd, setup.stdout_fd, setup.stderr_fd):
        os.close(held)


def _bury(rank: _Rank) -> None:
    _, status = os.waitpid(rank.pid, 0)
    _tell(rank.tells_fd, os.waitstatus_to_exitcode(status))
    os.close(rank.tells_fd)


def _tell(descriptor: int, number: int) -> None:
    # The starter may have closed the pipe or died.
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, f"{number}\n".encode())


def _receive(starter: socket.socket) -> _ForkRequest | None:
    """Receive the next request; None if the starter has closed the connection."""
    header, descriptors, _, _ = socket.recv_fds(starter, HEADER_BYTES, _NUM_DESCRIPTORS)
    if not header:
        return None
    rest = int.from_bytes(header)
    body = b""
    while len(body) < rest:
        chunk = starter.recv(rest - len(body))
        if not chunk:
            return None
        body += chunk
    start_path, folder, environment = json.loads(body)
    messages_fd, control_fd, stdout_fd, stderr_fd, tells_fd = descriptors
    setup = ProcessSetup(
        start_path=start_path,
        environment=environment,
        folder=folder,
        messages_fd=messages_fd,
        control_fd=control_fd,
        stdout_fd=stdout_fd,
        stderr_fd=stderr_fd,
    )
    return _ForkRequest(setup=setup, tells_fd=tells_fd)


# In a forked rank


def _begin(order: _ForkRequest) -> dict[str, Any]:
    """Set up the rank like a fresh process, except for sys.path, which is equal for all ranks of a forkserver."""
    setup = order.setup
    os.setsid()
    for number, usual in _IGNORED.items():
        signal.signal(number, usual)
    os.close(order.tells_fd)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for given, usual in ((setup.stdout_fd, 1), (setup.stderr_fd, 2)):
        os.dup2(given, usual)
        os.close(given)
    os.environ.clear()
    os.environ.update(setup.environment)
    os.chdir(setup.folder)
    start: dict[str, Any] = json.loads(Path(setup.start_path).read_text())
    sys.argv[:] = start["argv"]
    importlib.invalidate_caches()
    if "numpy" in sys.modules:
        # Python reseeds its own generator after a fork, but not this one.
        sys.modules["numpy"].random.seed()
    # The forkserver lives until its last rank has ended, or dies with the starter.
    return start | {"messages_fd": setup.messages_fd, "control_fd": setup.control_fd, "dies_with_starter": True}
