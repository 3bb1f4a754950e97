"""Serves the key-value store of one run, in its own process, which does not import torch.

Decides who may use the store: processes of the same user over a Unix socket, owners of the run's secret over TCP. The
server ends with the process that started it, and then removes the run's private folders. Started by `store_process`.
"""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.machine.credentials import is_same_user
from outrider.store.store_protocol import HELLO, NONCE_BYTES, PROOF_BYTES, frame, is_proof, proof, take_frame

FOLDER_KEY = b"outrider/folder"
"""The key of the path of the run's private folder, if there is one."""
HANDSHAKE_S = 10.0
"""Time within which a client must prove that it knows the secret."""
_PARENT_CHECK_S = 1.0
_MAX_STRANGERS = 128
_OK, _TIMEOUT, _REFUSED = b"ok", b"timeout", b"refused"


@dataclass(slots=True, eq=False)
class _Client:
    """One connection, with one request at a time."""

    connection: socket.socket
    nonce: bytes = b""
    """The nonce for the proof that the client must send; empty once it has sent the proof."""
    deadline_s: float = 0.0
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    awaited: Sequence[bytes] = ()
    """Keys for which the client waits until the deadline."""
    reply: Callable[[], tuple[bytes, ...]] | None = None


class StoreServer:
    """Keys, values, and the clients that wait for keys."""

    def __init__(self, listener: socket.socket, *, secret: bytes | None) -> None:
        self._listener = listener
        self._secret = secret
        self._values: dict[bytes, bytes] = {}
        self._clients: dict[int, _Client] = {}
        self._limited: set[_Client] = set()
        """Clients with a deadline, for proving the secret or for a wait."""
        self._selector = selectors.DefaultSelector()
        self._requests: dict[bytes, Callable[..., tuple[bytes, ...]]] = {
            b"set": self._set,
            b"add": self._add,
            b"check": self._check,
            b"compare_set": self._compare_set,
            b"delete": self._delete,
            b"append": self._append,
            b"count": lambda: (str(len(self._values)).encode(),),
        }

    def put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value

    def serve(self, *, until_readable: int, parent_pid: int) -> None:
        """Serve until the descriptor is readable or closed, or the parent has died."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(until_readable, selectors.EVENT_READ)
        next_check_s = 0.0
        while True:
            now_s = time.monotonic()
            if now_s > next_check_s:
                if os.getppid() != parent_pid:
                    return
                next_check_s = now_s + _PARENT_CHECK_S
            for key, events in self._selector.select(self._patience_s(now_s)):
                if key.fd == until_readable:
                    return
                if key.fileobj is self._listener:
                    self._welcome()
                elif key.fd in self._clients:
                    self._attend(self._clients[key.fd], events)
            if self._limited:
                self._expire()

    def _patience_s(self, now_s: float) -> float:
        if not self._limited:
            return _PARENT_CHECK_S
        rest_s = min(client.deadline_s for client in self._limited) - now_s
        return max(0.0, min(_PARENT_CHECK_S, rest_s))

    def _welcome(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        is_local = connection.family == getattr(socket, "AF_UNIX", None)
        num_strangers = sum(bool(client.nonce) for client in self._clients.values())
        if (is_local and not is_same_user(connection)) or num_strangers >= _MAX_STRANGERS:
            connection.close()
            return
        connection.setblocking(False)
        client = _Client(connection)
        self._clients[connection.fileno()] = client
        self._selector.register(connection, selectors.EVENT_READ)
        if not is_local:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.nonce = secrets.token_bytes(NONCE_BYTES)
            self._limit(client, HANDSHAKE_S)
            self._send(client, HELLO + client.nonce)

    def _attend(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(client, b"")
            if events & selectors.EVENT_READ:
                chunk = client.connection.recv(65_536)
                if not chunk:
                    raise ConnectionError
                client.inbox += chunk
                if not client.nonce or self._has_proved(client):
                    self._answer_all(client)
        except BlockingIOError:
            pass
        except (OSError, ValueError, TypeError, IndexError):
            self._drop(client)

    def _has_proved(self, client: _Client) -> bool:
        """Read the client's proof from its inbox if it has arrived; a wrong proof ends the connection."""
        if len(client.inbox) < NONCE_BYTES + PROOF_BYTES:
            return False
        nonce, told = bytes(client.inbox[:NONCE_BYTES]), bytes(client.inbox[NONCE_BYTES:][:PROOF_BYTES])
        if self._secret is None or not is_proof(told, self._secret, b"client", client.nonce, nonce):
            raise ConnectionError
        del client.inbox[: NONCE_BYTES + PROOF_BYTES]
        self._send(client, proof(self._secret, b"server", client.nonce, nonce))
        client.nonce = b""
        self._limited.discard(client)
        return True

    def _limit(self, client: _Client, limit_s: float) -> None:
        client.deadline_s = time.monotonic() + limit_s
        self._limited.add(client)

    def _answer_all(self, client: _Client) -> None:
        while client.reply is None and (parts := take_frame(client.inbox)) is not None:
            name, *rest = parts or [b""]
            if name in (b"get", b"wait"):
                self._await(client, int(rest[0]), rest[1:], has_values=name == b"get")
            elif name in self._requests:
                self._send(client, frame(_OK, *self._requests[name](*rest)))
            else:
                self._send(client, frame(_REFUSED, b"unknown request"))

    def _await(self, client: _Client, limit_ms: int, keys: Sequence[bytes], *, has_values: bool) -> None:
        client.awaited = keys
        client.reply = lambda: tuple(self._values[key] for key in keys) if has_values else ()
        self._settle(client)
        if client.reply is not None:
            self._limit(client, limit_ms / 1e3)

    def _settle(self, client: _Client) -> None:
        if client.reply is not None and all(key in self._values for key in client.awaited):
            self._end_wait(client, frame(_OK, *client.reply()))

    def _end_wait(self, client: _Client, answer: bytes) -> None:
        client.awaited, client.reply = (), None
        self._limited.discard(client)
        self._send(client, answer)

    def _expire(self) -> None:
        now_s = time.monotonic()
        for client in [client for client in self._limited if client.deadline_s <= now_s]:
            if client.nonce:
                self._drop(client)
            else:
                missing = [key for key in client.awaited if key not in self._values]
                self._end_wait(client, frame(_TIMEOUT, *missing))

    def _send(self, client: _Client, data: bytes) -> None:
        """Send as many bytes as the socket accepts now; the rest follows when the socket is writable again."""
        had_rest = bool(client.outbox)
        client.outbox += data
        try:
            del client.outbox[: client.connection.send(client.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        if had_rest != bool(client.outbox):
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outbox else 0)
            self._selector.modify(client.connection, wanted)

    def _drop(self, client: _Client) -> None:
        self._limited.discard(client)
        if self._clients.pop(client.connection.fileno(), None) is not None:
            self._selector.unregister(client.connection)
        client.connection.close()

    # The requests of a client; each answer is a tuple of frame parts.

    def _changed(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for client in [client for client in self._limited if key in client.awaited]:
            self._settle(client)

    def _set(self, *pairs: bytes) -> tuple[bytes, ...]:
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            self._changed(key, value)
        return ()

    def _add(self, key: bytes, amount: bytes) -> tuple[bytes, ...]:
        total = str(int(self._values.get(key, b"0")) + int(amount)).encode()
        self._changed(key, total)
        return (total,)

    def _check(self, *keys: bytes) -> tuple[bytes, ...]:
        return (b"1" if all(key in self._values for key in keys) else b"0",)

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> tuple[bytes, ...]:
        """Like torch's stores: a missing key matches only an empty expected value."""
        found = self._values.get(key)
        if found == expected or (found is None and not expected):
            self._changed(key, desired)
            return (desired,)
        return (expected if found is None else found,)

    def _delete(self, key: bytes) -> tuple[bytes, ...]:
        return (b"0" if self._values.pop(key, None) is None else b"1",)

    def _append(self, key: bytes, value: bytes) -> tuple[bytes, ...]:
        self._changed(key, self._values.get(key, b"") + value)
        return ()


def main(order: dict[str, Any]) -> None:
    """Serve until standard input has data or is closed."""
    # A batch system signals all processes of a job, but the ranks need this process during their orderly stop.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = order["folder"]
    secret = order["secret"]
    try:
        # Change the working directory, so that the starter's folder can be removed meanwhile.
        os.chdir("/")
        listener = socket.socket(fileno=order["listener_fd"])
        server = StoreServer(listener, secret=None if secret is None else bytes.fromhex(secret))
        if folder is not None:
            server.put(FOLDER_KEY, folder.encode())
        server.serve(until_readable=sys.stdin.fileno(), parent_pid=order["parent_pid"])
    finally:
        for path in order["remove"]:
            shutil.rmtree(path, ignore_errors=True)
