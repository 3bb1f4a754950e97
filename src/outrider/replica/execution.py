"""How a replica's steps run: eagerly, compiled, or captured as a CUDA graph. Asked for, or tried out and chosen.

Decides by a rehearsal on the replica itself; every choice comes with its reason. Called once per rank, before training.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from outrider.core.effects import Decision
from outrider.core.split import even
from outrider.data.parcel import Parcel
from outrider.replica.capture import CaptureStream, Uncapturable
from outrider.replica.captured import CapturedSteps
from outrider.replica.compiled import CompiledStep
from outrider.replica.rehearsal import Rehearsal, Trial
from outrider.replica.replica import Replica
from outrider.replica.snapshot import Snapshot

LEAST_GAIN = 1.05
"""A captured step must be so much faster than an eager one to be worth its memory and its rules."""
COMPILE_CAPABILITY = (7, 0)
"""What Triton needs of a CUDA device."""

OnDecision = Callable[[Decision], None]


def choose_execution(
    replica: Replica, first_batch: Callable[[], Parcel], *, samples: int, on_decision: OnDecision
) -> Decision:
    """Set the replica up for the execution that its recipe asks for; `on_decision` hears of a later change of mind."""
    asked = replica.recipe.execution
    if asked == "eager":
        return _decided("eager", "execution=eager was given")
    if asked == "compile":
        return _compiled(replica, first_batch(), samples, on_decision)
    if replica.device.type != "cuda":
        return _decided("eager", f"a CUDA graph needs a CUDA device, this rank has {replica.name}")
    return _captured(replica, first_batch(), samples, on_decision)


def _decided(value: str, reason: str, **details: Any) -> Decision:
    return Decision("execution", value, reason, details)


def _captured(replica: Replica, parcel: Parcel, samples: int, on_decision: OnDecision) -> Decision:
    stream = CaptureStream(replica.device)
    rehearsal = Rehearsal(replica, parcel, samples=samples, stream=stream)
    eager = rehearsal.eager()
    captured = _trial_or_refusal(rehearsal, eager)
    if isinstance(captured, str):
        # The frames of the failed step held its loss, and with it autograd's memory of another stream.
        gc.collect()
        return _decided("eager", f"the step cannot be captured: {captured}", eager_ms=round(eager.ms, 2))
    details = {"eager_ms": round(eager.ms, 2), "graph_ms": round(captured.ms, 2)}
    timing = f"a captured step takes {details['graph_ms']:.2f} ms, an eager one {details['eager_ms']:.2f} ms"
    if replica.recipe.execution == "auto" and eager.ms < LEAST_GAIN * captured.ms:
        return _decided("eager", timing, **details)
    replica.captured = CapturedSteps(
        replica,
        stream=stream,
        on_refusal=lambda reason: on_decision(_decided("eager", f"the step can no longer be captured: {reason}")),
    )
    return _decided("graph", timing, **details)


def _trial_or_refusal(rehearsal: Rehearsal, eager: Trial) -> Trial | str:
    try:
        return rehearsal.captured(eager)
    except Uncapturable as refusal:
        return str(refusal)


def _compiled(replica: Replica, parcel: Parcel, samples: int, on_decision: OnDecision) -> Decision:
    """Compiled kernels still wait for their launches: on a CUDA device they are captured too."""
    started_s = time.perf_counter()
    trouble = _cannot_compile(replica) or _try_compiled(replica, parcel, samples)
    if replica.device.type != "cuda":
        return _decided("eager" if trouble else "compile", trouble or _took(started_s))
    took = _took(started_s)
    captured = _captured(replica, parcel, samples, on_decision)
    if trouble:
        return _decided(captured.value, f"{trouble}; {captured.reason}", **captured.details)
    return _decided("compile", f"{took}; {captured.reason}", **captured.details)


def _took(started_s: float) -> str:
    return f"torch.compile took {time.perf_counter() - started_s:.1f} s"


def _cannot_compile(replica: Replica) -> str | None:
    if replica.recipe.policy == "balanced":
        return "the step is not compiled: the shares of a batch change their sizes"
    if replica.device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(replica.device)
    if capability >= COMPILE_CAPABILITY:
        return None
    needed, has = (".".join(map(str, version)) for version in (COMPILE_CAPABILITY, capability))
    return f"the step is not compiled: torch.compile needs compute capability {needed}, {replica.name} has {has}"


def _try_compiled(replica: Replica, parcel: Parcel, samples: int) -> str | None:
    """Why the step cannot be compiled; None where it is from now on."""
    snapshot = Snapshot(replica)
    try:
        # First as it is: an error of the user's own is not one of the compiler's.
        replica.plain_step(parcel.batch(), samples=samples, at=0)
        replica.compiled = CompiledStep(replica.recipe.step, samples=even(samples, replica.recipe.accumulate)[0])
        replica.plain_step(parcel.batch(), samples=samples, at=0)
        return None
    except Exception as error:
        if replica.compiled is None:
            raise
        replica.compiled = None
        lines = str(error).splitlines() or [""]
        return f"the step cannot be compiled: {lines[0]}"
    finally:
        snapshot.restore()
        replica.tally.drain()
        replica.logbook.drain()
