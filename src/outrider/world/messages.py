"""The messages between ranks and starter: one JSON line per message, including errors.

Decides how messages and errors are encoded, and what happens if nobody reads them: training continues, progress
messages may be dropped, all others are kept. Used by ranks through their Link, by `rank_main`, and by the starter's
Ranks.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.machine.devices import DeviceSpec, num_cores, threads_alone, threads_per_rank
from outrider.world.environment import Environment

DROPPABLE = frozenset({"progress"})
"""Kinds of messages that may be dropped, because the next one replaces them."""
LAST = frozenset({"done", "error"})
"""Kinds of final messages of a rank, which waits until the pipe has room for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A message from a rank to its starter."""

    rank: int
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


def encode(message: Message) -> bytes:
    return json.dumps({"kind": message.kind, "fields": message.fields}).encode() + b"\n"


def decode(line: bytes, *, rank: int) -> Message:
    content = json.loads(line)
    return Message(rank=rank, kind=content["kind"], fields=content["fields"])


class Link:
    """A rank's side of the connection to its starter: its identity, its messages, and whether it should stop."""

    def __init__(
        self,
        *,
        environment: Environment,
        spec: DeviceSpec,
        num_threads: int,
        deliver: Callable[[Message], None],
        num_threads_alone: int | None = None,
        owns_process: bool = False,
    ) -> None:
        self.environment = environment
        self.spec = spec
        self.num_threads = num_threads
        self.num_threads_alone = num_threads if num_threads_alone is None else num_threads_alone
        """Threads while the other ranks rest."""
        self.owns_process = owns_process
        """Whether our launcher started this process, so that we may change its global settings."""
        self.stop_requested = threading.Event()
        self.interrupted_by: signal.Signals | None = None
        """The signal that stops the run, if any."""
        self.step: int | None = None
        """The step at which a user's loop failed."""
        self.model_file: Path | None = None
        """The path of the trained model, once it is written."""
        self._deliver = deliver
        self._is_watched = False

    @property
    def rank(self) -> int:
        return self.environment.rank

    def interrupt(self, number: signal.Signals) -> None:
        """Ask this rank to stop because of a signal; takes no lock, because signal handlers call it."""
        self.interrupted_by = self.interrupted_by or number

    @property
    def wants_stop(self) -> bool:
        """Whether the run should end at the next average, because of a request or a signal."""
        return self.interrupted_by is not None or self.stop_requested.is_set()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message to the starter; its fields must be valid JSON."""
        # From the first step on, a long silence means that the rank hangs.
        self._is_watched |= kind == "progress"
        self._deliver(Message(rank=self.rank, kind=kind, fields=fields))

    def tell_model(self, path: str) -> None:
        """Report where rank 0 wrote the trained model: outside of the run folder if the disk was full."""
        self.model_file = Path(path)
        self.send("model", path=path)

    def warn(self, text: str) -> None:
        """Print one line for the user, on the stderr of this rank and of the starter."""
        print(f"outrider: {text}", file=sys.stderr, flush=True)
        self.send("warning", text=text)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Context for work that may take long, in which the starter does not consider the silent rank hung."""
        if not self._is_watched:
            yield
            return
        self.send("watch", is_on=False)
        yield
        self.send("watch", is_on=True)


def _nowhere(message: Message) -> None:
    """Drop the message; used without a starter, under torchrun and similar launchers."""


def adopted_link(
    environment: Environment,
    *,
    devices: Sequence[DeviceSpec],
    num_threads: int | None = None,
    on_message: Callable[[Message], None] = _nowhere,
) -> Link:
    """The Link of a rank under torchrun or a similar launcher; `devices` are the devices of this host's ranks."""
    rank = environment.local_rank
    return Link(
        environment=environment,
        spec=devices[rank],
        num_threads=threads_per_rank(devices, num_cores())[rank] if num_threads is None else num_threads,
        num_threads_alone=threads_alone(devices, num_cores())[rank] if num_threads is None else num_threads,
        deliver=on_message,
    )


class Inbox:
    """A queue of messages that stays small even if the program never reads it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message | int | None] = queue.SimpleQueue()
        self._newest: dict[int, Message] = {}
        """The latest unread progress message of each rank; in the queue, the rank's number stands for it."""
        self._lock = threading.Lock()

    def put(self, message: Message | None) -> None:
        """Add a message; None means that no message will follow."""
        if message is None or message.kind not in DROPPABLE:
            self._queue.put(message)
            return
        with self._lock:
            has_place = message.rank in self._newest
            self._newest[message.rank] = message
            if not has_place:
                self._queue.put(message.rank)

    def get(self, timeout: float | None = None) -> Message | None:
        """Return the next message; raises `queue.Empty` if none arrives in time."""
        found = self._queue.get(timeout=timeout)
        if not isinstance(found, int):
            return found
        with self._lock:
            return self._newest.pop(found)


class PipeWriter:
    """Writes whole messages in order, from any thread; blocks only for final messages."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._unsent = b""

    def __call__(self, message: Message) -> None:
        with self._lock:
            self._write()
            if self._unsent and message.kind in DROPPABLE:
                return
            self._unsent += encode(message)
            self._write()
            if message.kind in LAST:
                self._write_all()

    def _write(self) -> None:
        """Write as many bytes as the pipe has room for."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._descriptor, self._unsent) :]
        except BlockingIOError:
            pass

    def _write_all(self) -> None:
        """Write everything, waiting for room; if the starter dies meanwhile, another thread ends this process."""
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        while self._unsent:
            poller.poll()
            self._write()
