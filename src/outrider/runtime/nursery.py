"""Ranks that need not import torch: they are forked from a process that did it for all of them.

Decides when a nursery can be used and when a new one is needed. Does not decide what a rank gets: launch does.
What the nursery's own process does is in `nursery_keeper`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.runtime.environment import wants_fresh_ranks

__all__ = ["TRAINING", "Nest", "Nursery", "nursery_for"]

TRAINING = ("outrider.runtime.entry", "torch._dynamo")
"""What every rank that trains imports; the second with the first optimizer that it makes."""
CAN_FORK = sys.platform == "linux" and hasattr(os, "pidfd_open")
"""Elsewhere a fork of a process with libraries in it is not to be trusted."""
HEADER_BYTES = 8
"""An order to fork begins with the length of what follows."""
_PASSING = frozenset({"PYTEST_CURRENT_TEST"})
"""Variables that change all the time, and that no library reads as it is loaded."""

# Carries the starter's sys.path over before anything of ours is imported, as for a rank.
_BOOT = """\
import json, sys
start = json.loads(sys.argv[1])
sys.path[:] = start["path"] + [entry for entry in sys.path if entry and entry not in start["path"]]
from outrider.runtime.nursery_keeper import main
main(start)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nest:
    """What the process of a rank is given, forked or fresh."""

    start_path: str
    environment: Mapping[str, str]
    folder: str
    messages_fd: int
    control_fd: int
    stdout_fd: int
    stderr_fd: int


class Nursery:
    """A process that imports modules once and forks ranks that have them."""

    def __init__(self, *, imports: Sequence[str], environment: Mapping[str, str], path: Sequence[str]) -> None:
        self._imports, self._environment, self._path = tuple(imports), dict(environment), tuple(path)
        self._owner_pid = os.getpid()
        self._has_forked = False
        self.is_unfit = False
        """Its first rank was never born; the reason shows where a fresh process tries the same."""
        self._lock = threading.Lock()
        self._socket, keepers = socket.socketpair()
        start = {
            "path": list(path),
            "imports": list(imports),
            "socket_fd": keepers.fileno(),
            # The signal comes with the end of the thread that started it, which other threads may not outlive.
            "dies_with_starter": threading.current_thread() is threading.main_thread(),
        }
        with keepers:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(start)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environment,
                pass_fds=(keepers.fileno(),),
                start_new_session=True,
            )
        # It may go by itself: somebody must have waited for it then.
        threading.Thread(target=self._process.wait, name="outrider-nursery", daemon=True).start()
        atexit.register(self.close)

    def serves(self, *, imports: Sequence[str], environment: Mapping[str, str], path: Sequence[str]) -> bool:
        """Whether a rank forked here finds what a fresh process would; libraries read variables as they are loaded."""
        wanted = (tuple(imports), _lasting(environment), tuple(path))
        is_same = wanted == (self._imports, _lasting(self._environment), self._path)
        return is_same and self._owner_pid == os.getpid() and self._process.poll() is None

    def fork(self, nest: Nest) -> Forked | None:
        """A new rank; None where the nursery turns out to be unfit, or has just gone."""
        forked = self._ask_for(nest)
        self._has_forked |= forked is not None
        self.is_unfit = not self._has_forked
        return forked

    def _ask_for(self, nest: Nest) -> Forked | None:
        told_fd, tells_fd = os.pipe()
        try:
            with self._lock:
                _send(self._socket, nest, tells_fd=tells_fd)
        except OSError:
            os.close(told_fd)
            return None
        finally:
            os.close(tells_fd)
        return Forked.heard_of(told_fd)

    def retire(self) -> None:
        """No more ranks; it goes with the last of those it has."""
        self._socket.close()

    def close(self) -> None:
        """Its ranks end with it. A fork of the starter runs this at its exit too, and must leave it alone."""
        atexit.unregister(self.close)
        self._socket.close()
        if os.getpid() == self._owner_pid:
            self._process.kill()
            self._process.wait()


class Forked:
    """A rank as its nursery tells of it, with the face of a Popen."""

    def __init__(self, pid: int, told_fd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._told_fd = told_fd

    @classmethod
    def heard_of(cls, told_fd: int) -> Forked | None:
        """Once the nursery has told its number; that takes as long as the imports for the first one."""
        try:
            pid = _read_number(told_fd)
        except BaseException:
            os.close(told_fd)
            raise
        if pid is None:
            os.close(told_fd)
            return None
        return cls(pid, told_fd)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._told_fd], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            code = _read_number(self._told_fd)
            # A nursery that was killed takes its ranks along.
            self.returncode = -signal.SIGKILL if code is None else code
            os.close(self._told_fd)
        return self.returncode


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _PASSING}


def _send(channel: socket.socket, nest: Nest, *, tells_fd: int) -> None:
    body = json.dumps([nest.start_path, nest.folder, dict(nest.environment)]).encode()
    descriptors = [nest.messages_fd, nest.control_fd, nest.stdout_fd, nest.stderr_fd, tells_fd]
    socket.send_fds(channel, [len(body).to_bytes(HEADER_BYTES)], descriptors)
    channel.sendall(body)


def _read_number(descriptor: int) -> int | None:
    """A line with a number in it; None where the other end was closed instead."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            return None
        line += byte
    return int(line)


_current: Nursery | None = None
_changing = threading.Lock()


def nursery_for(*, imports: Sequence[str], environment: Mapping[str, str]) -> Nursery | None:
    """One that serves ranks of this kind: the last one where it does, or a new one. None where none can."""
    global _current
    if not (CAN_FORK and imports) or wants_fresh_ranks(environment):
        return None
    wanted: dict[str, Any] = {"imports": imports, "environment": environment, "path": sys.path}
    with _changing:
        if _current is not None and _current.is_unfit:
            return None
        if _current is None or not _current.serves(**wanted):
            if _current is not None:
                _current.retire()
            _current = Nursery(**wanted)
        return _current
