"""The client of our own store: a torch Store over an authenticated connection.

Decides the timeouts, and which of torch's errors is raised for which problem. `world.store` decides the address. The
server ends every wait, so the client does not poll.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError

from outrider.machine.credentials import is_same_user, peer_uid
from outrider.store.store_protocol import (
    HELLO,
    NONCE_BYTES,
    PROOF_BYTES,
    frame,
    is_proof,
    proof,
    read_exactly,
    read_frame,
)
from outrider.store.store_server import FOLDER_KEY

_GRACE_S = 10.0
"""Extra time for the server's message that a wait has timed out."""
_RETRY_S = 0.05


class Untrusted(Exception):
    """The server is not trusted; the message gives the reason."""


class StoreConnection:
    """One connection to the server; threads take turns."""

    def __init__(self, connection: socket.socket, *, place: str) -> None:
        self.place = place
        self._connection = connection
        connection.settimeout(None)
        self._limit_s = 0.0
        self._inbox = bytearray()
        self._lock = threading.Lock()
        self._on_close: list[Callable[[], None]] = []
        self.stores: list[object] = []
        """Stores, kept until the process ends: C++ holds only its half of a store and would call deleted methods."""

    def ask(self, *parts: bytes, limit_s: float) -> list[bytes]:
        """Send a request and return the server's answer: status and values."""
        with self._lock:
            try:
                if self._limit_s != limit_s:
                    self._set_limit(limit_s)
                self._connection.sendall(frame(*parts))
                return read_frame(self._connection, self._inbox)
            except BlockingIOError:
                self._connection.close()
                raise DistNetworkError(f"no answer from the store at {self.place} within {limit_s:g} s") from None
            except (OSError, ValueError) as error:
                self._connection.close()
                raise DistNetworkError(f"lost the store at {self.place}: {error}") from error
            except BaseException:
                # The rest of an answer may still arrive, and the next request would take it for its own answer.
                self._connection.close()
                raise

    def _set_limit(self, limit_s: float) -> None:
        """Set the timeout in the kernel; a Python timeout would need an extra poll for every read."""
        limit = struct.pack("@ll", int(limit_s), int(limit_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._connection.setsockopt(socket.SOL_SOCKET, option, limit)
        self._limit_s = limit_s

    def on_close(self, callback: Callable[[], None]) -> None:
        self._on_close.append(callback)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self.stores.clear()
        while self._on_close:
            self._on_close.pop()()


class PrivateStore(Store):
    """Implements torch's Store interface; C++ calls it too when a process group uses the store."""

    def __init__(self, wire: StoreConnection, *, timeout_s: float, prefix: str = "") -> None:
        super().__init__()
        self.wire = wire
        wire.stores.append(self)
        self._prefix = prefix
        self._timeout_s = timeout_s

    @property
    def prefix(self) -> str:
        return self._prefix

    def folder(self) -> str | None:
        """The private folder of the run, which is removed with the store; None for a store between hosts."""
        status, *rest = self.wire.ask(b"get", b"0", FOLDER_KEY, limit_s=self._timeout_s + _GRACE_S)
        return rest[0].decode() if status == b"ok" else None

    def under(self, prefix: str) -> PrivateStore:
        """The same store with a prefix for all keys."""
        return PrivateStore(self.wire, timeout_s=self._timeout_s, prefix=f"{self._prefix}{prefix}/")

    def close(self) -> None:
        self.wire.close()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._timeout_s = timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(b"set", self._key(key), _bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(b"add", self._key(key), str(amount).encode())[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask(b"compare_set", self._key(key), _bytes(expected), _bytes(desired))[0]

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(b"check", *map(self._key, keys))[0] == b"1"

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(b"wait", keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return self._ask(b"delete", self._key(key))[0] == b"1"

    def num_keys(self) -> int:
        return int(self._ask(b"count")[0])

    # C++ calls these two methods by other names.
    deleteKey = delete_key
    getNumKeys = num_keys

    def has_extended_api(self) -> bool:
        return True

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(b"append", self._key(key), _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._await(b"get", keys, self._timeout_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        self._ask(b"set", *(part for key, value in pairs for part in (self._key(key), _bytes(value))))

    def clone(self) -> PrivateStore:
        return self

    def _key(self, key: str) -> bytes:
        return f"{self._prefix}{key}".encode()

    def _ask(self, *parts: bytes) -> list[bytes]:
        status, *rest = self.wire.ask(*parts, limit_s=self._timeout_s + _GRACE_S)
        if status != b"ok":
            raise DistStoreError(f"the store at {self.wire.place} refused a request: {rest}")
        return rest

    def _await(self, name: bytes, keys: Sequence[str], limit_s: float) -> list[bytes]:
        asked = map(self._key, keys)
        status, *rest = self.wire.ask(name, str(round(limit_s * 1e3)).encode(), *asked, limit_s=limit_s + _GRACE_S)
        if status != b"ok":
            missing = ", ".join(key.decode(errors="replace") for key in rest)
            raise DistStoreError(f"wait timeout after {limit_s:g} s, keys: {missing}")
        return rest


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def connect_local(address: str, *, deadline_s: float) -> StoreConnection:
    """Connect to the Unix socket at a path or @name; retries until this user's store answers or the deadline passes."""
    path = f"\0{address[1:]}" if address.startswith("@") else address

    def attempt() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
            if not is_same_user(connection):
                raise Untrusted(f"the store at {address} belongs to user {peer_uid(connection)}")
        except BaseException:
            connection.close()
            raise
        return connection

    return StoreConnection(_retried(attempt, deadline_s=deadline_s), place=address)


def connect_remote(host: str, port: int, *, secret: bytes, deadline_s: float) -> StoreConnection:
    """Connect to a TCP port; client and server prove to each other that they know the secret."""

    def attempt() -> socket.socket:
        rest_s = max(0.1, deadline_s - time.monotonic())
        connection = socket.create_connection((host, port), timeout=min(rest_s, _GRACE_S))
        try:
            _prove(connection, secret, place=f"{host}:{port}")
        except BaseException:
            connection.close()
            raise
        return connection

    return StoreConnection(_retried(attempt, deadline_s=deadline_s), place=f"{host}:{port}")


def _prove(connection: socket.socket, secret: bytes, *, place: str) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if read_exactly(connection, len(HELLO)) != HELLO:
        raise Untrusted(f"what listens at {place} is no store of ours")
    servers, own = read_exactly(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    connection.sendall(own + proof(secret, b"client", servers, own))
    try:
        told = read_exactly(connection, PROOF_BYTES)
    except ConnectionError:
        raise Untrusted(f"the store at {place} has another OUTRIDER_SECRET than this rank") from None
    if not is_proof(told, secret, b"server", servers, own):
        raise Untrusted(f"the store at {place} does not know OUTRIDER_SECRET")


def _retried(attempt: Callable[[], socket.socket], *, deadline_s: float) -> socket.socket:
    """Retry until the server is up; raises at once for a server that is not trusted."""
    while True:
        try:
            return attempt()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_RETRY_S)
