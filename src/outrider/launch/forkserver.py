"""A forkserver for ranks: a process imports torch once, and every rank is forked from it.

Decides when a forkserver can be used and when a new one is needed. The launcher decides how a rank is set up.
`forkserver_process` is the code of the forkserver's own process.
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

from outrider.world.environment import wants_fresh_ranks

__all__ = ["TRAINING", "Forkserver", "ProcessSetup", "forkserver_for"]

TRAINING = ("outrider.rank.entry", "torch._dynamo")
"""The modules that every training rank imports; torch imports the second one with its first optimizer."""
CAN_FORK = sys.platform == "linux" and hasattr(os, "pidfd_open")
"""On other systems, it is not safe to fork a process that has loaded libraries."""
HEADER_BYTES = 8
"""A fork request starts with the length of its body."""
_PASSING = frozenset({"PYTEST_CURRENT_TEST", "OUTRIDER_FAULTS"})
"""Variables that change often and that no library reads while it is loaded."""

# Copies the starter's sys.path before importing any of our modules, as in a rank.
_BOOT = """\
import json, sys
start = json.loads(sys.argv[1])
sys.path[:] = start["path"] + [entry for entry in sys.path if entry and entry not in start["path"]]
from outrider.launch.forkserver_process import main
main(start)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSetup:
    """The settings of a rank's process, forked or fresh."""

    start_path: str
    environment: Mapping[str, str]
    folder: str
    messages_fd: int
    control_fd: int
    stdout_fd: int
    stderr_fd: int


class Forkserver:
    """A process that imports modules once and forks ranks that share them."""

    def __init__(self, *, imports: Sequence[str], environment: Mapping[str, str], path: Sequence[str]) -> None:
        self._imports, self._environment, self._path = tuple(imports), dict(environment), tuple(path)
        self._owner_pid = os.getpid()
        self._has_forked = False
        self.is_unfit = False
        """Whether the first fork failed; a fresh process that does the same will show the reason."""
        self._lock = threading.Lock()
        self._socket, keepers = socket.socketpair()
        start = {
            "path": list(path),
            "imports": list(imports),
            "socket_fd": keepers.fileno(),
            # The kernel sends the signal when the starting thread ends, so only the main thread may request it.
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
        # The process may exit by itself; its exit status must then be collected.
        threading.Thread(target=self._process.wait, name="outrider-forkserver", daemon=True).start()
        atexit.register(self.close)

    def serves(self, *, imports: Sequence[str], environment: Mapping[str, str], path: Sequence[str]) -> bool:
        """Whether a fork would equal a fresh process; libraries read environment variables when they are loaded."""
        wanted = (tuple(imports), _lasting(environment), tuple(path))
        is_same = wanted == (self._imports, _lasting(self._environment), self._path)
        return is_same and self._owner_pid == os.getpid() and self._process.poll() is None

    def fork(self, setup: ProcessSetup) -> Forked | None:
        """Fork a new rank; None if the forkserver is not usable or has just exited."""
        forked = self._ask_for(setup)
        self._has_forked |= forked is not None
        self.is_unfit = not self._has_forked
        return forked

    def _ask_for(self, setup: ProcessSetup) -> Forked | None:
        told_fd, tells_fd = os.pipe()
        try:
            with self._lock:
                _send(self._socket, setup, tells_fd=tells_fd)
        except OSError:
            os.close(told_fd)
            return None
        finally:
            os.close(tells_fd)
        return Forked.heard_of(told_fd)

    def retire(self) -> None:
        """Accept no more requests; the forkserver exits with its last rank."""
        self._socket.close()

    def close(self) -> None:
        """End the forkserver and its ranks. A fork of the starter also runs this at exit, and must not end them."""
        atexit.unregister(self.close)
        self._socket.close()
        if os.getpid() == self._owner_pid:
            self._process.kill()
            self._process.wait()


class Forked:
    """A forked rank with the interface of a Popen; the forkserver reports its pid and exit status."""

    def __init__(self, pid: int, told_fd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._told_fd = told_fd

    @classmethod
    def heard_of(cls, told_fd: int) -> Forked | None:
        """Wait for the pid from the forkserver; for the first rank this takes as long as the imports."""
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
            # If the forkserver was killed, its ranks were killed too.
            self.returncode = -signal.SIGKILL if code is None else code
            os.close(self._told_fd)
        return self.returncode


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _PASSING}


def _send(channel: socket.socket, setup: ProcessSetup, *, tells_fd: int) -> None:
    body = json.dumps([setup.start_path, setup.folder, dict(setup.environment)]).encode()
    descriptors = [setup.messages_fd, setup.control_fd, setup.stdout_fd, setup.stderr_fd, tells_fd]
    socket.send_fds(channel, [len(body).to_bytes(HEADER_BYTES)], descriptors)
    channel.sendall(body)


def _read_number(descriptor: int) -> int | None:
    """Read a line with a number; None if the other end was closed."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            return None
        line += byte
    return int(line)


_current: Forkserver | None = None
_changing = threading.Lock()


def forkserver_for(*, imports: Sequence[str], environment: Mapping[str, str]) -> Forkserver | None:
    """The current forkserver if it fits these ranks, otherwise a new one; None if no forkserver can be used."""
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
            _current = Forkserver(**wanted)
        return _current
