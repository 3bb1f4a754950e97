"""Decides how ranks of one machine get hold of each other's memory: handed from one to the other over a Unix socket.

The memory has no name and ends with the ranks; the socket's folder is gone once all have met. Knows nothing of what
is written there. Called when a collective between neighbours is opened.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Exchange = Callable[[Any], list[Any]]
"""Tells all ranks a value and returns those of all, in their order."""
MEET_S = 30.0
"""All ranks come at the same time; where one cannot reach another, the others need not wait for long."""
_HELLO = struct.Struct("<I")
# A socket's path may have 107 characters, of which our folder's name takes about 40.
_MAX_BASE_LENGTH = 60


class NoDoorway(Exception):
    """Ranks cannot share memory here; sums travel another way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours:
    """All ranks of one machine, as one of them sees them."""

    rank: int
    memories: tuple[Tensor, ...]
    """Of every rank, in their order, as bytes; this rank's own among them."""
    connections: dict[int, socket.socket]
    """To every other rank."""

    def close(self) -> None:
        for connection in self.connections.values():
            # A thread that waits for this peer is woken by it, which closing alone would not do.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def meet_neighbours(rank: int, num_bytes: int, *, exchange: Exchange) -> Neighbours:
    """Called by every rank; raises `NoDoorway` on all of them where one cannot."""
    with contextlib.ExitStack() as stack:
        doorway = _try(lambda: stack.enter_context(_Doorway.open(num_bytes)))
        paths = exchange(None if doorway is None else doorway.path)
        _refuse([other for other, path in enumerate(paths) if path is None])
        assert doorway is not None, "this rank has told its path"
        neighbours = _try(lambda: doorway.meet(rank, paths))
        have_met = exchange(neighbours is not None)
        try:
            _refuse([other for other, has_met in enumerate(have_met) if not has_met])
        except NoDoorway:
            if neighbours is not None:
                neighbours.close()
            raise
        assert neighbours is not None, "this rank has told that it met all others"
        return neighbours


def _refuse(ranks: list[int]) -> None:
    if ranks:
        listed = ", ".join(map(str, ranks))
        raise NoDoorway(f"rank{'s' if len(ranks) > 1 else ''} {listed} cannot share memory with the others")


def _try(attempt: Callable[[], T]) -> T | None:
    try:
        return attempt()
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Doorway:
    """Where one rank can be met, and the memory that it shows to those who come."""

    path: str
    listener: socket.socket
    file: int
    num_bytes: int

    @classmethod
    @contextlib.contextmanager
    def open(cls, num_bytes: int) -> Iterator[_Doorway]:
        with contextlib.ExitStack() as stack:
            file = _anonymous_file(num_bytes)
            stack.callback(os.close, file)
            base = tempfile.gettempdir()
            # Made for this user alone.
            folder = tempfile.mkdtemp(
                prefix=f"outrider-{os.getpid()}-", dir=base if len(base) <= _MAX_BASE_LENGTH else "/tmp"
            )
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            path = str(Path(folder) / "door")
            listener.bind(path)
            listener.listen()
            yield cls(path=path, listener=listener, file=file, num_bytes=num_bytes)

    def meet(self, rank: int, paths: Sequence[str]) -> Neighbours:
        """Go to all ranks before this one, let all those after it come."""
        memories: dict[int, Tensor] = {rank: self._map(os.dup(self.file))}
        with contextlib.ExitStack() as undo:
            connections: dict[int, socket.socket] = {}
            for other in range(rank):
                connections[other] = undo.enter_context(socket.socket(socket.AF_UNIX))
                connections[other].settimeout(MEET_S)
                connections[other].connect(paths[other])
                self._show(connections[other], rank)
            self.listener.settimeout(MEET_S)
            for _ in range(rank + 1, len(paths)):
                connection = undo.enter_context(self.listener.accept()[0])
                connection.settimeout(MEET_S)
                other, memories[other] = self._see(connection)
                connections[other] = connection
                self._show(connection, rank)
            for other in range(rank):
                _, memories[other] = self._see(connections[other])
            undo.pop_all()
        return Neighbours(
            rank=rank,
            memories=tuple(memories[other] for other in range(len(paths))),
            connections={other: connections[other] for other in sorted(connections)},
        )

    def _show(self, connection: socket.socket, rank: int) -> None:
        socket.send_fds(connection, [_HELLO.pack(rank)], [self.file])

    def _see(self, connection: socket.socket) -> tuple[int, Tensor]:
        hello, files, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
        if len(hello) != _HELLO.size or len(files) != 1:
            raise ConnectionError("a rank left before it had shown its memory")
        (rank,) = _HELLO.unpack(hello)
        return rank, self._map(files[0])

    def _map(self, file: int) -> Tensor:
        try:
            return torch.frombuffer(mmap.mmap(file, self.num_bytes), dtype=torch.uint8)
        finally:
            os.close(file)


def _anonymous_file(num_bytes: int) -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory without a name")
    file = os.memfd_create("outrider")
    os.ftruncate(file, num_bytes)
    return file
