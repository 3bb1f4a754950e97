"""Opens the key-value store where ranks meet: serves it, or connects to the one that is there.

Decides what it listens on: loopback, unless ranks on several hosts need it. Called by launch and by World.
"""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistNetworkError

from outrider.errors import ConfigError, WaitError
from outrider.runtime.environment import Environment

_ALL_INTERFACES = ""


def serve_store(host: str, port: int) -> TCPStore:
    """A store that lives as long as the object; port 0 takes a free one."""
    if not 0 <= port <= 65_535:
        raise ConfigError(f"port must be 0 to 65535, got {port}", hint="leave port out and a free one is taken")
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(
            f"port {port} on {host or 'all interfaces'} {_trouble(error)}",
            hint="leave port out and a free one is taken",
        ) from error
    # TCPStore by itself listens on all interfaces.
    return TCPStore(
        host or "localhost",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _trouble(error: OSError) -> str:
    # create_server adds words to strerror, so the system's own are looked up again.
    return "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened: {os.strerror(error.errno or 0)}"


def open_store(environment: Environment, *, timeout_s: float) -> PrefixStore:
    """The store of this world; every rank calls it."""
    if environment.rank == 0 and not environment.has_store:
        host = "127.0.0.1" if environment.is_one_host else _ALL_INTERFACES
        store = serve_store(host, environment.master_port)
    else:
        store = _connect(environment, timeout_s=timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    return PrefixStore(f"outrider/{environment.attempt}", store)


def _connect(environment: Environment, *, timeout_s: float) -> TCPStore:
    address, port = environment.master_addr, environment.master_port
    try:
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except DistNetworkError as error:
        raise WaitError(
            f"rank {environment.rank} waited {timeout_s:g} s for the store at {address}:{port}",
            hint="see that rank 0 was started, and that the address can be reached from here",
            rank=environment.rank,
        ) from error
