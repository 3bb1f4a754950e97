"""Opens the key-value store of a world: serves it, or connects to an existing one.

Decides who may connect: this user on one host, and owners of the shared secret between hosts. torchrun's agent decides
who may connect to its own store; connections to it get timeouts here, because torch waits without a limit. If a
connection is lost, the error names the hosts. Called by World, by leases, and by `bench` to keep one store for several
worlds.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import _get_default_store

from outrider.errors import ConfigError, PeerLostError, WaitError
from outrider.store.store_client import PrivateStore, StoreConnection, Untrusted, connect_local, connect_remote
from outrider.store.store_process import StoreProcess, serve_on_port, serve_under_name
from outrider.world.environment import Environment
from outrider.world.shared_secret import required_secret

_DESCRIPTORS = "/proc/self/fd"
_TIMEVAL = struct.Struct("ll")


def limit_waits(port: int, *, timeout_s: float) -> None:
    """Set timeouts on this process's connections to the port, so that late answers and dead networks raise errors."""
    if not os.path.isdir(_DESCRIPTORS):
        return
    for name in os.listdir(_DESCRIPTORS):
        if _is_socket(int(name)):
            with socket.fromfd(int(name), -1, -1, -1) as connection:
                if _remote_port(connection) == port:
                    _limit(connection, timeout_s=timeout_s)


def _limit(connection: socket.socket, *, timeout_s: float) -> None:
    seconds = max(1, round(timeout_s))
    limit = _TIMEVAL.pack(seconds, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    # Unacknowledged data ends the connection after this time; idle connections are probed with the same limit.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds // 4))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 4))


def _remote_port(connection: socket.socket) -> int | None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        port: int = connection.getpeername()[1]
    except OSError:
        return None
    return port


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


class WatchedStore:
    """The store operations that ranks use, with errors that name the hosts."""

    def __init__(self, store: Store, environment: Environment) -> None:
        self.raw = store
        """The underlying torch store."""
        self._environment = environment

    def under(self, prefix: str) -> WatchedStore:
        """The same store with a prefix for all keys."""
        return WatchedStore(under(self.raw, prefix), self._environment)

    def set(self, key: str, value: str) -> None:
        with self._watched():
            self.raw.set(key, value)

    def get(self, key: str) -> bytes:
        with self._watched():
            return self.raw.get(key)

    def check(self, keys: list[str]) -> bool:
        with self._watched():
            return self.raw.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._watched():
            return self.raw.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        with self._watched():
            return self.raw.delete_key(key)

    def are_set(self, keys: list[str], *, limit_s: float) -> bool:
        """Wait until all keys are set; returns false at the timeout."""
        with self._watched():
            try:
                self.raw.wait(keys, timedelta(seconds=limit_s))
            except DistStoreError:
                return False
        return True

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except DistNetworkError as error:
            raise PeerLostError(
                f"{self._told()} lost the store{self._place()}: {_first_line(error)}",
                hint="see that rank 0 and its host are still running, and that the network between the hosts works",
                rank=self._server,
            ) from error
        except DistStoreError as error:
            raise WaitError(
                f"{self._told()} got no answer from the store{self._place()} in time: {_first_line(error)}",
                hint="see the logs of the other ranks, and that the network between the hosts works",
                rank=self._server,
            ) from error

    def _told(self) -> str:
        return f"rank {self._environment.rank} on {socket.gethostname()}"

    def _place(self) -> str:
        environment = self._environment
        return "" if environment.is_one_host else f" at {environment.master_addr}:{environment.master_port}"

    @property
    def _server(self) -> int | None:
        """The rank that serves the store; None if a starter or an agent serves it."""
        return None if self._environment.has_store else 0


def _first_line(error: BaseException) -> str:
    """The first line of the message, after which torch adds a stack of C++ frames."""
    return next(iter(str(error).splitlines()), type(error).__name__)


_TCP = "tcp"


def open_store(environment: Environment, *, timeout_s: float) -> Store:
    """Open the store of this world; every rank calls this, and closes it with `close_store`."""
    if environment.has_group:
        return PrefixStore(f"outrider/{environment.attempt}", _get_default_store())
    if environment.has_store and environment.store is None:
        return PrefixStore(f"outrider/{environment.attempt}", _agent_store(environment, timeout_s=timeout_s))
    with ExitStack() as undo:
        if not environment.rank and not environment.has_store:
            undo.callback(_serve(environment).close)
        wire = _connect(environment, timeout_s=timeout_s)
        wire.on_close(undo.pop_all().close)
    return PrivateStore(wire, timeout_s=timeout_s).under(f"outrider/{environment.attempt}")


def own_store(environment: Environment, *, exchange: Callable[[Any], list[Any]], timeout_s: float) -> Store | None:
    """Open a private store instead of torchrun's if all ranks are on one host; None otherwise.

    All ranks call this. The name of the private store is published in torchrun's store, to which other users may write,
    so the client checks that the server is a process of this user.
    """
    if not (environment.is_one_host and sys.platform == "linux"):
        return None
    name = f"outrider-{os.geteuid()}-{secrets.token_hex(8)}"
    with ExitStack() as undo:
        if environment.rank == 0:
            undo.callback(serve_under_name(name).close)
        address = str(exchange(f"@{name}")[0])
        wire = _connect(replace(environment, store=address), timeout_s=timeout_s)
        wire.on_close(undo.pop_all().close)
    return PrivateStore(wire, timeout_s=timeout_s).under("outrider")


def under(store: Store, prefix: str) -> Store:
    """The same store with a prefix for all keys."""
    return store.under(prefix) if isinstance(store, PrivateStore) else PrefixStore(prefix, store)


def is_ours(store: Store) -> bool:
    """Whether the store authenticates its clients; torchrun's store does not."""
    return isinstance(store, PrivateStore)


def close_store(store: Store) -> None:
    """Close the connection and, if this rank started it, the server; torch's stores close with their last reference."""
    if isinstance(store, PrivateStore):
        store.close()


@contextmanager
def kept_store(environment: Environment) -> Iterator[Environment]:
    """Keep one store on rank 0 for several worlds of the same ranks; yields the environment for these worlds."""
    if environment.has_store:
        yield environment
        return
    with closing(_serve(environment)) if environment.rank == 0 else nullcontext():
        yield replace(environment, store=_address(environment), has_store=True)


def group_store(
    store: Store,
    *,
    environment: Environment,
    timeout_s: float,
    exchange: Callable[[Any], list[Any]],
    at_end: Callable[[Callable[[], None]], object],
) -> Store:
    """The store in which torch's process groups exchange addresses; called by all ranks.

    C++ threads of the groups may use it at any time, so on one host it is a FileStore in the private folder of the run.
    Between hosts it is the store itself. `at_end` registers a function that must be called after the groups have ended
    and before the last reference to the store is dropped.
    """
    if not isinstance(store, PrivateStore):
        return store
    folder = store.folder()
    if not all(exchange(folder is not None and _is_private(folder))):
        return store
    assert folder is not None, "this rank has seen the folder"
    name = hashlib.blake2b(store.prefix.encode(), digest_size=8).hexdigest()
    path = os.path.join(folder, f"groups-{name}")
    # The destructor of a FileStore reopens its file if it exists, and ends the process if another rank removes the
    # folder meanwhile. So each rank has its own link to the file, and removes the link first.
    own = f"{path}-{environment.rank}"
    os.symlink(path, own)
    at_end(partial(Path(own).unlink, missing_ok=True))
    groups = FileStore(own, environment.world_size)
    groups.set_timeout(timedelta(seconds=timeout_s))
    return groups


def _is_private(folder: str) -> bool:
    try:
        status = os.stat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _address(environment: Environment) -> str:
    """The address of the store that rank 0 serves; all ranks compute the same address."""
    if environment.is_one_host and sys.platform == "linux":
        return f"@outrider-{os.geteuid()}-{environment.master_port}-{environment.attempt}"
    return _TCP


def _serve(environment: Environment) -> StoreProcess:
    address = _address(environment)
    if address != _TCP:
        return serve_under_name(address[1:])
    return serve_on_port(environment.master_port, secret=_secret(environment))


def _secret(environment: Environment) -> bytes:
    return required_secret(why=f"{environment.world_size} ranks meet over the network at {environment.master_addr}")


def _connect(environment: Environment, *, timeout_s: float) -> StoreConnection:
    address = environment.store or _address(environment)
    host, port = environment.store_addr, environment.master_port
    place = f"{host}:{port}" if address == _TCP else address
    deadline_s = time.monotonic() + timeout_s
    try:
        if address != _TCP:
            return connect_local(address, deadline_s=deadline_s)
        return connect_remote(host, port, secret=_secret(environment), deadline_s=deadline_s)
    except Untrusted as error:
        raise ConfigError(
            f"rank {environment.rank}: {error}",
            hint="set the same OUTRIDER_SECRET on all ranks, and a MASTER_PORT that nothing else uses",
            rank=environment.rank,
        ) from error
    except OSError as error:
        raise _not_found(environment, place, timeout_s=timeout_s) from error


def _agent_store(environment: Environment, *, timeout_s: float) -> TCPStore:
    address, port = environment.store_addr, environment.master_port
    try:
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except DistNetworkError as error:
        raise _not_found(environment, f"{address}:{port}", timeout_s=timeout_s) from error
    limit_waits(port, timeout_s=timeout_s)
    return store


def _not_found(environment: Environment, place: str, *, timeout_s: float) -> WaitError:
    return WaitError(
        f"rank {environment.rank} waited {timeout_s:g} s for the store at {place}",
        hint="see that rank 0 was started, and that the address can be reached from here",
        rank=environment.rank,
    )
