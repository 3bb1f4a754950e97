"""What ranks and starter say to each other: one JSON line per message, and errors that survive the journey.

Decides how messages and errors are written and read; moves no bytes between processes itself.
Used by ranks through their Link, by the child that carries it, and by the starter's Ranks.
"""

from __future__ import annotations

import json
import re
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider import errors
from outrider.errors import GPU_FAULT, OutriderError, PeerLostError, StepError, named
from outrider.machine.devices import DeviceSpec, num_cores, threads_per_rank
from outrider.runtime.environment import Environment

_PACKAGE_FOLDER = str(Path(errors.__file__).parent)
# What Gloo and NCCL say when the other side is gone; they have no error type of their own for it.
_LOST_PEER = re.compile(
    r"gloo.*(closed by peer|reset by peer|broken pipe|connection refused)|remote process exited",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """Something a rank told its starter."""

    rank: int
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


def encode(message: Message) -> bytes:
    return json.dumps({"kind": message.kind, "fields": message.fields}).encode() + b"\n"


def decode(line: bytes, *, rank: int) -> Message:
    content = json.loads(line)
    return Message(rank=rank, kind=content["kind"], fields=content["fields"])


class Link:
    """A rank's side of the line to its starter: who it is, what it tells, and whether it should stop."""

    def __init__(
        self,
        *,
        environment: Environment,
        spec: DeviceSpec,
        num_threads: int,
        deliver: Callable[[Message], None],
        owns_process: bool = False,
    ) -> None:
        self.environment = environment
        self.spec = spec
        self.num_threads = num_threads
        self.owns_process = owns_process
        """Whether the process was started for the rank and nothing else, and is ours to set up."""
        self.stop_requested = threading.Event()
        self.step: int | None = None
        """Where a user's loop was when it failed."""
        self._deliver = deliver

    @property
    def rank(self) -> int:
        return self.environment.rank

    def send(self, kind: str, **fields: Any) -> None:
        """Tell the starter; the fields must be what JSON can hold."""
        self._deliver(Message(rank=self.rank, kind=kind, fields=fields))


def _nowhere(message: Message) -> None:
    """Nobody listens where torchrun or the like started the ranks."""


def adopted_link(
    environment: Environment,
    *,
    devices: Sequence[DeviceSpec],
    num_threads: int | None = None,
    on_message: Callable[[Message], None] = _nowhere,
) -> Link:
    """The Link of a rank that torchrun or the like started; `devices` are those of this host's ranks."""
    threads = threads_per_rank(devices, num_cores())
    return Link(
        environment=environment,
        spec=devices[environment.local_rank],
        num_threads=threads[environment.local_rank] if num_threads is None else num_threads,
        deliver=on_message,
    )


def describe_error(error: BaseException, *, rank: int, spec: DeviceSpec, step: int | None = None) -> dict[str, Any]:
    """The fields of an error message; what the user's code raised becomes a StepError."""
    if isinstance(error, OutriderError):
        return {
            "type": type(error).__name__,
            "message": error.message,
            "hint": error.hint or _way_out(error.message, spec),
            "rank": rank if error.rank is None else error.rank,
            "step": error.step,
            "traceback": error.traceback or user_traceback(error),
        }
    kind = PeerLostError if _LOST_PEER.search(str(error)) else StepError
    message = f"rank {rank} ({spec}){'' if step is None else f', step {step}'}: {named(error)}"
    return {
        "type": kind.__name__,
        "message": message,
        "hint": _way_out(message, spec),
        "rank": rank,
        "step": step,
        "traceback": user_traceback(error),
    }


def _way_out(message: str, spec: DeviceSpec) -> str | None:
    """For a fault on a GPU, which is told later than it happened, and to everybody."""
    if GPU_FAULT not in message:
        return None
    shared = "; a fault ends all runs of its MPS daemon, so look at the first that failed" if spec.share else ""
    return f"with CUDA_LAUNCH_BLOCKING=1 the traceback shows the operation at fault{shared}"


def rebuild_error(fields: dict[str, Any]) -> OutriderError:
    """The error that a rank described, as the same child of OutriderError."""
    kind = getattr(errors, fields["type"], None)
    if not (isinstance(kind, type) and issubclass(kind, OutriderError)):
        kind = StepError
    return kind(
        fields["message"],
        hint=fields["hint"],
        rank=fields["rank"],
        step=fields["step"],
        traceback=fields["traceback"],
    )


def as_ours(error: BaseException, link: Link) -> OutriderError | None:
    """The error as a starter would see it; None for a program that closes the run or is interrupted."""
    if isinstance(error, OutriderError):
        return error
    if not isinstance(error, Exception):
        return None
    return rebuild_error({**describe_error(error, rank=link.rank, spec=link.spec, step=link.step), "traceback": None})


def user_traceback(error: BaseException) -> str | None:
    """Where in the user's code an error came from, without our own frames; None where all frames are ours."""
    root = error.__cause__ if isinstance(error, OutriderError) and error.__cause__ is not None else error
    report = traceback.TracebackException.from_exception(root)
    has_user_frames = any(not _is_ours(frame) for frame in report.stack)
    if has_user_frames:
        _drop_our_frames(report)
    if not isinstance(root, OutriderError):
        # Without a user's frame it is a mistake of ours, and only our frames can tell where.
        return "".join(report.format())
    # The message of our own error is shown beside the traceback, so the frames are enough.
    return "".join(report.stack.format()) if has_user_frames else None


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_PACKAGE_FOLDER)


def _drop_our_frames(report: traceback.TracebackException) -> None:
    report.stack = traceback.StackSummary.from_list([frame for frame in report.stack if not _is_ours(frame)])
    for chained in (report.__cause__, report.__context__):
        if chained is not None:
            _drop_our_frames(chained)
