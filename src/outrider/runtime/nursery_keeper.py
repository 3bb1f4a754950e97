"""The process of a nursery: imports what ranks need, then forks one for every order that comes, and tells how it ended.

Decides whether it is fit to fork at all. In a rank, `main` goes on to the life of any other rank (`child`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.runtime import child
from outrider.runtime.nursery import HEADER_BYTES, Nest

IDLE_S = 60.0
"""Without ranks for so long it goes; the next ranks get another one."""
_NUM_DESCRIPTORS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    """A rank to be forked, and where its number and its end are told."""

    nest: Nest
    tells_fd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    pid: int
    tells_fd: int


def main(start: dict[str, Any]) -> None:
    """Serve the starter until it closes the connection; a rank that is born comes back from that too, to live."""
    if start["dies_with_starter"]:
        child.die_with_parent()
    for name in start["imports"]:
        importlib.import_module(name)
    # Held by nobody: the starter's folder can be removed while this waits.
    os.chdir("/")
    with socket.socket(fileno=start["socket_fd"]) as starter:
        born = _serve(starter) if _is_fit() else None
    if born is not None:
        child.main(_begin(born))


def _is_fit() -> bool:
    """A fork cannot use a GPU that was opened before it: no import may have done that."""
    return not any(target.startswith("/dev/nvidia") for target in map(_target, Path("/proc/self/fd").iterdir()))


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        # The folder itself, closed by now.
        return ""


def _serve(starter: socket.socket) -> _Order | None:
    """Returns in every rank, with the order for it; in the nursery at its end."""
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
    """In a new rank: what the nursery holds of the others is none of its business."""
    for watched, rank in ranks.items():
        os.close(watched)
        os.close(rank.tells_fd)


def _let_go(order: _Order, pid: int) -> None:
    """In the nursery: what the rank was given is the rank's alone."""
    _tell(order.tells_fd, pid)
    nest = order.nest
    for held in (nest.messages_fd, nest.control_fd, nest.stdout_fd, nest.stderr_fd):
        os.close(held)


def _bury(rank: _Rank) -> None:
    _, status = os.waitpid(rank.pid, 0)
    _tell(rank.tells_fd, os.waitstatus_to_exitcode(status))
    os.close(rank.tells_fd)


def _tell(descriptor: int, number: int) -> None:
    # The starter may have lost interest, or its life.
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, f"{number}\n".encode())


def _receive(starter: socket.socket) -> _Order | None:
    """The next order; None where the starter has closed the connection."""
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
    nest = Nest(
        start_path=start_path,
        environment=environment,
        folder=folder,
        messages_fd=messages_fd,
        control_fd=control_fd,
        stdout_fd=stdout_fd,
        stderr_fd=stderr_fd,
    )
    return _Order(nest=nest, tells_fd=tells_fd)


# In a rank


def _begin(order: _Order) -> dict[str, Any]:
    """Take on all that a fresh process would have been given, but for sys.path, by which nurseries are told apart."""
    nest = order.nest
    os.setsid()
    os.close(order.tells_fd)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for given, usual in ((nest.stdout_fd, 1), (nest.stderr_fd, 2)):
        os.dup2(given, usual)
        os.close(given)
    os.environ.clear()
    os.environ.update(nest.environment)
    os.chdir(nest.folder)
    start: dict[str, Any] = json.loads(Path(nest.start_path).read_text())
    sys.argv[:] = start["argv"]
    importlib.invalidate_caches()
    if "numpy" in sys.modules:
        # Python's own generator has a new seed after a fork, this one has that of its parent.
        sys.modules["numpy"].random.seed()
    # The nursery lives as long as the ranks it has, or dies with the starter.
    return start | {"messages_fd": nest.messages_fd, "control_fd": nest.control_fd, "dies_with_starter": True}
