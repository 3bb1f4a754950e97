"""Chooses how a replica's steps run: eager, compiled, or captured as a CUDA graph.

Decides by the recipe, or by trial steps on the replica; every choice has a reason. Called once per rank, before
training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from outrider.data.packed_batch import PackedBatch
from outrider.policy.effects import Decision
from outrider.replica.capture import CaptureStream, Uncapturable
from outrider.replica.captured import CapturedSteps
from outrider.replica.compiled import CompiledStep
from outrider.replica.out_of_memory import free_memory
from outrider.replica.replica import Replica
from outrider.replica.snapshot import Snapshot
from outrider.replica.trial_steps import Rehearsal, Trial

LEAST_GAIN = 1.05
"""A captured step must be faster than an eager one by this factor to be worth its memory and restrictions."""
COMPILE_CAPABILITY = (7, 0)
"""The compute capability that Triton needs."""

OnDecision = Callable[[Decision], None]


def choose_execution(
    replica: Replica, first_batch: Callable[[], PackedBatch], *, samples: int, on_decision: OnDecision
) -> Decision:
    """Set up the replica for the execution in its recipe; `on_decision` is called if that changes later."""
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


def _captured(replica: Replica, packed_batch: PackedBatch, samples: int, on_decision: OnDecision) -> Decision:
    if replica.loss_scale is not None:
        return _decided("eager", "with fp16 the host decides after each gradient whether the step counts")
    stream = CaptureStream(replica.device)
    rehearsal = Rehearsal(replica, packed_batch, samples=samples, stream=stream)
    eager = rehearsal.eager()
    captured = _trial_or_refusal(rehearsal, eager)
    # The graphs of the trial are gone, but their memory is still reserved for graphs. Also, the frames of a failed step
    # keep its loss, and with it the autograd state of another stream, until they are collected.
    stream.free()
    free_memory(replica.device)
    if isinstance(captured, str):
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


def _compiled(replica: Replica, packed_batch: PackedBatch, samples: int, on_decision: OnDecision) -> Decision:
    """Compile the step; on a CUDA device it is also captured, because compiled kernels still have launch overhead."""
    started_s = time.perf_counter()
    trouble = _cannot_compile(replica) or _try_compiled(replica, packed_batch, samples)
    if replica.device.type != "cuda":
        return _decided("eager" if trouble else "compile", trouble or _took(replica, started_s))
    took = _took(replica, started_s)
    captured = _captured(replica, packed_batch, samples, on_decision)
    if trouble:
        return _decided(captured.value, f"{trouble}; {captured.reason}", **captured.details)
    return _decided("compile", f"{took}; {captured.reason}", **captured.details)


def _took(replica: Replica, started_s: float) -> str:
    took = f"torch.compile took {time.perf_counter() - started_s:.1f} s"
    return f"{took}; parts of shared batches run uncompiled" if replica.recipe.policy_spec.switches else took


def _cannot_compile(replica: Replica) -> str | None:
    policy = replica.recipe.policy_spec
    if policy.batch_is_global and not policy.switches:
        return "the step is not compiled: the shares of a batch change their sizes"
    if replica.device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(replica.device)
    if capability >= COMPILE_CAPABILITY:
        return None
    needed, has = (".".join(map(str, version)) for version in (COMPILE_CAPABILITY, capability))
    return f"the step is not compiled: torch.compile needs compute capability {needed}, {replica.name} has {has}"


def _try_compiled(replica: Replica, packed_batch: PackedBatch, samples: int) -> str | None:
    """Compile the step; returns the reason if that fails, None on success."""
    snapshot = Snapshot(replica)
    try:
        # First uncompiled, to distinguish errors of the user's code from those of the compiler.
        replica.plain_step(packed_batch.batch(), samples=samples, at=0)
        replica.compiled = CompiledStep(replica.recipe.step, samples=replica.micro_batches.counts(samples)[0])
        replica.plain_step(packed_batch.batch(), samples=samples, at=0)
        return None
    except Exception as error:
        if replica.compiled is None:
            raise
        replica.compiled = None
        lines = str(error).splitlines() or [""]
        return f"the step cannot be compiled: {lines[0]}"
    finally:
        snapshot.restore()
        replica.loss_sums.drain()
        replica.logged_scalars.drain()
