"""Shares memory between ranks of one host by passing file descriptors over Unix sockets.

The memory is anonymous and is freed when the ranks end; the folder of the sockets is removed once all ranks are
connected. Only processes of this user are accepted. Called when a collective between ranks of one host is opened.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from outrider.machine.credentials import is_same_user

T = TypeVar("T")
Exchange = Callable[[Any], list[Any]]
"""An all-gather of small values, in rank order."""
MEET_S = 30.0
"""All ranks connect at the same time, so a short timeout is enough."""
_HELLO = struct.Struct("<I")
# A socket's path may have 107 characters; our folder's name takes about 40 of them.
_MAX_BASE_LENGTH = 60


class NoSharedMemory(Exception):
    """Ranks cannot share memory here; the caller uses another transport."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMemoryGroup:
    """The connections of one rank to all ranks of its host."""

    rank: int
    memories: tuple[Tensor, ...]
    """The memory of every rank as bytes, in rank order, including this rank."""
    connections: dict[int, socket.socket]
    """The sockets to every other rank."""

    def close(self) -> None:
        for connection in self.connections.values():
            # Shutdown wakes a thread that waits for this peer; close alone would not.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def connect_shared_memory(
    rank: int, num_bytes: int, *, exchange: Exchange, base: str | None = None
) -> SharedMemoryGroup:
    """Connect all ranks; called by every rank, and raises `NoSharedMemory` on all of them if one cannot connect.

    `base` is a private folder that another process removes even if this one is killed. The default is the folder for
    temporary files.
    """
    with contextlib.ExitStack() as stack:
        shared_memory = _try(
            lambda: stack.enter_context(_SharedMemorySocket.open(num_bytes, base or tempfile.gettempdir()))
        )
        paths = exchange(None if shared_memory is None else shared_memory.path)
        _refuse([other for other, path in enumerate(paths) if path is None])
        assert shared_memory is not None, "this rank has told its path"
        shared_memory_group = _try(lambda: shared_memory.meet(rank, paths))
        have_met = exchange(shared_memory_group is not None)
        try:
            _refuse([other for other, has_met in enumerate(have_met) if not has_met])
        except NoSharedMemory:
            if shared_memory_group is not None:
                shared_memory_group.close()
            raise
        assert shared_memory_group is not None, "this rank has told that it met all others"
        return shared_memory_group


def _refuse(ranks: list[int]) -> None:
    if ranks:
        listed = ", ".join(map(str, ranks))
        raise NoSharedMemory(f"rank{'s' if len(ranks) > 1 else ''} {listed} cannot share memory with the others")


def _try(attempt: Callable[[], T]) -> T | None:
    try:
        return attempt()
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _SharedMemorySocket:
    """The listening socket of one rank, and the memory that it shares."""

    path: str
    listener: socket.socket
    file: int
    num_bytes: int

    @classmethod
    @contextlib.contextmanager
    def open(cls, num_bytes: int, base: str) -> Iterator[_SharedMemorySocket]:
        with contextlib.ExitStack() as stack:
            file = _anonymous_file(num_bytes)
            stack.callback(os.close, file)
            # mkdtemp makes the folder private to this user.
            folder = tempfile.mkdtemp(
                prefix=f"outrider-{os.getpid()}-", dir=base if len(base) <= _MAX_BASE_LENGTH else "/tmp"
            )
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            path = str(Path(folder) / "door")
            listener.bind(path)
            listener.listen()
            yield cls(path=path, listener=listener, file=file, num_bytes=num_bytes)

    def meet(self, rank: int, paths: Sequence[str]) -> SharedMemoryGroup:
        """Connect to lower ranks; accept connections from higher ranks."""
        memories: dict[int, Tensor] = {rank: self._map(os.dup(self.file))}
        with contextlib.ExitStack() as undo:
            connections: dict[int, socket.socket] = {}
            for other in range(rank):
                connections[other] = undo.enter_context(socket.socket(socket.AF_UNIX))
                connections[other].settimeout(MEET_S)
                connections[other].connect(paths[other])
                if not is_same_user(connections[other]):
                    raise ConnectionError(f"another user listens at {paths[other]}")
                self._show(connections[other], rank)
            awaited = set(range(rank + 1, len(paths)))
            deadline_s = time.monotonic() + MEET_S
            while awaited:
                self.listener.settimeout(max(0.0, deadline_s - time.monotonic()))
                connection = undo.enter_context(self.listener.accept()[0])
                come = self._admitted(connection, awaited)
                if come is None:
                    connection.close()
                    continue
                other, memories[other] = come
                awaited.remove(other)
                connections[other] = connection
                self._show(connection, rank)
            for other in range(rank):
                told, memories[other] = self._see(connections[other])
                if told != other:
                    raise ConnectionError(f"rank {told} answers for rank {other}")
            undo.pop_all()
        return SharedMemoryGroup(
            rank=rank,
            memories=tuple(memories[other] for other in range(len(paths))),
            connections={other: connections[other] for other in sorted(connections)},
        )

    def _show(self, connection: socket.socket, rank: int) -> None:
        socket.send_fds(connection, [_HELLO.pack(rank)], [self.file])

    def _admitted(self, connection: socket.socket, awaited: set[int]) -> tuple[int, Tensor] | None:
        """The rank and memory of an accepted connection; None for a process of another user, which is ignored."""
        if not is_same_user(connection):
            return None
        connection.settimeout(MEET_S)
        try:
            other, memory = self._see(connection)
        except ConnectionError:
            return None
        return (other, memory) if other in awaited else None

    def _see(self, connection: socket.socket) -> tuple[int, Tensor]:
        hello, files, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
        if len(hello) != _HELLO.size or len(files) != 1:
            for file in files:
                os.close(file)
            raise ConnectionError("a rank left before it had shown its memory")
        (rank,) = _HELLO.unpack(hello)
        return rank, self._map(files[0])

    def _map(self, file: int) -> Tensor:
        try:
            return torch.frombuffer(mmap.mmap(file, self.num_bytes), dtype=torch.uint8)
        except ValueError as error:
            raise ConnectionError(f"memory of another size than {self.num_bytes} bytes: {error}") from error
        finally:
            os.close(file)


def _anonymous_file(num_bytes: int) -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory without a name")
    file = os.memfd_create("outrider")
    os.ftruncate(file, num_bytes)
    return file
