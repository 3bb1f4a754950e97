"""Starts and ends the process that serves the store of a run.

Decides the store's address: a socket in a private folder, a name within this network namespace, or a port for other
hosts. Does not import torch. Called by `launch`, and by `world.store` if rank 0 serves the store.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from outrider.errors import ConfigError

_END_S = 10.0
# A socket's path may have 107 characters; our folder's name takes about 40 of them.
_MAX_BASE_LENGTH = 60
_PORT_HINT = "leave port out and a free one is taken"
# Copies the starter's sys.path before importing any of our modules, as in a rank.
_BOOT = """\
import json, sys
order = json.loads(sys.stdin.buffer.raw.readline())
sys.path[:] = order["path"]
from outrider.store.store_server import main
main(order)
"""


class StoreProcess:
    """The server process, which ends with `close()` or with this process."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        address: str,
        folder: str | None = None,
        remove: Sequence[str] = (),
        secret: bytes | None = None,
    ) -> None:
        self.address = address
        self._remove = [*remove, *([] if folder is None else [folder])]
        order = {
            "path": sys.path,
            "listener_fd": listener.fileno(),
            "parent_pid": os.getpid(),
            "folder": folder,
            "remove": self._remove,
            # Do not put the secret into the command line, which every local user can read.
            "secret": None if secret is None else secret.hex(),
        }
        with listener:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
                # Ctrl-C and Ctrl-Z in the terminal must not reach the server: ranks run on if the starter is stopped.
                start_new_session=True,
            )
        self._tell(json.dumps(order).encode() + b"\n")

    def close(self) -> None:
        """End the server; never raises, to keep the run's own error."""
        if self._process.returncode is not None:
            return
        # Send a message, because a forked process may keep the pipe open after it is closed here.
        self._tell(b"end\n")
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for path in self._remove:
            shutil.rmtree(path, ignore_errors=True)

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        # If the server has already died, its clients report that.
        with contextlib.suppress(OSError):
            self._process.stdin.write(line)
            self._process.stdin.flush()


def serve_in_private_folder(*, remove: Sequence[str] = ()) -> StoreProcess:
    """Start a store for ranks of this user on this host, at a socket in a new folder that the server removes.

    The server also removes the folders in `remove`, because it runs a moment longer than a starter that was killed.
    """
    folder = make_private_folder()
    path = os.path.join(folder, "store")
    try:
        return StoreProcess(_listen(socket.AF_UNIX, path), address=path, folder=folder, remove=remove)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def serve_under_name(name: str) -> StoreProcess:
    """Start a store for ranks of this user in this network namespace, under a name that all ranks know."""
    try:
        listener = _listen(socket.AF_UNIX, f"\0{name}")
    except OSError as error:
        raise ConfigError(
            f"the store's name {name} {_trouble(error)}", hint="set MASTER_PORT to another number on all ranks"
        ) from error
    folder = make_private_folder()
    try:
        return StoreProcess(listener, address=f"@{name}", folder=folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def serve_on_port(port: int, *, secret: bytes) -> StoreProcess:
    """Start a store on all interfaces, for clients that prove that they know the secret."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        listener = socket.create_server(
            ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=128
        )
    except OSError as error:
        raise ConfigError(
            f"port {port} on all interfaces {_trouble(error)}", hint="set MASTER_PORT to a free port on all ranks"
        ) from error
    return StoreProcess(listener, address=f"port {port}", secret=secret)


def make_private_folder() -> str:
    """Create a private folder with a path short enough for a socket in it."""
    return tempfile.mkdtemp(prefix=f"outrider-{os.getpid()}-store-", dir=_base())


def _base() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _MAX_BASE_LENGTH else "/tmp"


def _listen(family: int, address: str) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def free_port(host: str, port: int) -> int:
    """Return the given port if it is free; for 0, return any free port."""
    if not 0 <= port <= 65_535:
        raise ConfigError(f"port must be 0 to 65535, got {port}", hint=_PORT_HINT)
    try:
        with socket.create_server((host, port)) as listener:
            found: int = listener.getsockname()[1]
            return found
    except OSError as error:
        raise ConfigError(f"port {port} on {host} {_trouble(error)}", hint=_PORT_HINT) from error


def _trouble(error: OSError) -> str:
    # create_server adds text to strerror, so look up the system's own text.
    return "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened: {os.strerror(error.errno or 0)}"
