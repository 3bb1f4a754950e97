"""Encodes the errors of ranks for their starter, and rebuilds them there: type, message, hint, rank, step, traceback.

Decides which errors mean a lost peer, and which lines of a traceback a user sees. Called by `rank_main`, by
sessions and by the starter's Ranks.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

from outrider import errors
from outrider.errors import GPU_FAULT, OutriderError, PeerLostError, StepError, WaitError, named
from outrider.machine.devices import DeviceSpec
from outrider.world.messages import Link

_PACKAGE_FOLDER = str(Path(errors.__file__).parent)
# Messages of Gloo and NCCL for a lost peer; neither has an error type for it.
_LOST_PEER = re.compile(
    r"gloo.*(closed by peer|reset by peer|broken pipe|connection refused|timed out)|remote process exited",
    re.IGNORECASE | re.DOTALL,
)
# torch's error types by name, because this module must not import torch.
_NETWORK_ERRORS = ("DistNetworkError", "DistStoreError")


def describe_error(error: BaseException, *, rank: int, spec: DeviceSpec, step: int | None = None) -> dict[str, Any]:
    """The fields of an error message; exceptions of user code become a StepError."""
    if isinstance(error, OutriderError):
        return {
            "type": type(error).__name__,
            "message": error.message,
            "hint": error.hint or _way_out(error.message, spec),
            # A rank that timed out or lost a peer is not the cause itself.
            "rank": error.rank if isinstance(error, (PeerLostError, WaitError)) else _known(error.rank, rank),
            "step": error.step,
            "traceback": error.traceback or user_traceback(error),
        }
    is_lost = type(error).__name__ in _NETWORK_ERRORS or _LOST_PEER.search(str(error))
    kind = PeerLostError if is_lost else StepError
    message = f"rank {rank} ({spec}){'' if step is None else f', step {step}'}: {named(error)}"
    return {
        "type": kind.__name__,
        "message": message,
        "hint": _way_out(message, spec),
        "rank": rank,
        "step": step,
        "traceback": user_traceback(error),
    }


def _known(rank: int | None, otherwise: int) -> int:
    return otherwise if rank is None else rank


def _way_out(message: str, spec: DeviceSpec) -> str | None:
    """The hint for a GPU fault, which CUDA reports late and to all processes on the GPU."""
    if GPU_FAULT not in message:
        return None
    shared = "; a fault ends all runs of its MPS daemon, so look at the first that failed" if spec.share else ""
    return f"with CUDA_LAUNCH_BLOCKING=1 the traceback shows the operation at fault{shared}"


def rebuild_error(fields: dict[str, Any]) -> OutriderError:
    """Rebuild the error that a rank described, as the same subclass of OutriderError."""
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
    """Convert an exception to an OutriderError; None if the program closes the run or is interrupted."""
    if isinstance(error, OutriderError):
        return error
    if not isinstance(error, Exception):
        return None
    return rebuild_error({**describe_error(error, rank=link.rank, spec=link.spec, step=link.step), "traceback": None})


def user_traceback(error: BaseException) -> str | None:
    """The traceback in the user's code, without our own frames; None if all frames are ours."""
    root = error.__cause__ if isinstance(error, OutriderError) and error.__cause__ is not None else error
    report = traceback.TracebackException.from_exception(root)
    has_user_frames = any(not _is_ours(frame) for frame in report.stack)
    if has_user_frames:
        _drop_our_frames(report)
    if not isinstance(root, OutriderError):
        # Without any frame of user code it is our bug, and our frames are needed to find it.
        return "".join(report.format())
    # The message of our own error is shown separately, so the frames are enough.
    return "".join(report.stack.format()) if has_user_frames else None


def _is_ours(frame: traceback.FrameSummary) -> bool:
    # Ranks run scripts through runpy.
    return frame.filename.startswith(_PACKAGE_FOLDER) or frame.filename == "<frozen runpy>"


def _drop_our_frames(report: traceback.TracebackException) -> None:
    report.stack = traceback.StackSummary.from_list([frame for frame in report.stack if not _is_ours(frame)])
    for chained in (report.__cause__, report.__context__):
        if chained is not None:
            _drop_our_frames(chained)
