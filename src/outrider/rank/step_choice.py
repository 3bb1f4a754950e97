"""Chooses, before training, the memory format of a rank's model and how its step runs.

Decides which samples to try. `replica` makes the choices, which go to the timeline with their reasons; `slices` checks
the step's matrix products. Called once per rank, at set-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from outrider.data.feed import Feed
from outrider.data.order import in_order
from outrider.data.packed_batch import PackedBatch, packed_batch_of
from outrider.policy.effects import Batch, Decision
from outrider.replica.execution import choose_execution
from outrider.replica.micro_batch_search import find_micro_batch
from outrider.replica.replica import Replica
from outrider.replica.trial_steps import FormatChoice, agree, choose_memory_format, products_of_step
from outrider.slices.slice_matmul_check import mend_products
from outrider.timeline.recorder import Recorder
from outrider.world.world import World

# On two slices of a GPU, ResNet-34 hung in channels_last, but never in the model's own format (docs/log.md). Most
# likely cuDNN's BatchNorm for channels_last waits inside its kernel for multiprocessors that neighbours hold.
_ON_A_SLICE = FormatChoice(
    value="contiguous", reason="on a slice, kernels of channels_last can wait for ever for what its neighbours hold"
)

_EAGER_GRADIENTS = "gradients of shared steps are computed eagerly: their sums then overlap with the backward pass"

_FORMAT_SAMPLES = 8
"""Enough to see whether a step works, and few enough to fit any device."""


def agree_on_format(replica: Replica, feed: Feed, *, world: World, devices: Sequence[str], recorder: Recorder) -> None:
    """Choose one memory format for all ranks, whose flat arenas are summed. Only worlds with CUDA devices gain."""
    if replica.recipe.memory_format != "auto" or not any(name.startswith("cuda") for name in devices):
        return
    if world.spec.share is None:
        mine = choose_memory_format(replica, _first_batch(replica, feed, at_most=_FORMAT_SAMPLES).batch())
    else:
        mine = _ON_A_SLICE
    told = world.exchange_json(asdict(mine), name="memory formats")
    choice = agree([FormatChoice(**fields) for fields in told])
    if choice.value == "channels_last":
        replica.use_channels_last()
    if world.rank == 0:
        recorder.event("memory format", value=choice.value, reason=choice.reason)


def fit_micro_batch(replica: Replica, feed: Feed, *, later_bytes: int, recorder: Recorder) -> None:
    """Find the largest micro-batch that fits on a GPU; skipped if a size was given or remembered, and on a CPU.

    A host has no limit of its own to test: it swaps, or its kernel kills processes. `later_bytes` is what averages will
    allocate during training.
    """
    if replica.device.type != "cuda" or replica.micro_batches.limit is not None:
        return
    samples = _num_first(replica, feed)
    batch = _first_batch(replica, feed).batch()
    found = find_micro_batch(replica, batch, samples=samples, later_bytes=later_bytes)
    if found is not None:
        recorder.event(found.kind, value=found.value, reason=found.reason, **found.details)


def check_products(replica: Replica, feed: Feed, *, world: World) -> None:
    """On a slice, check the matrix products of the step itself: kernels are wrong there for some shapes."""
    if world.spec.share is None:
        return
    batch = _first_batch(replica, feed).batch()
    products = products_of_step(replica, batch, samples=_num_first(replica, feed))
    if products:
        mend_products(world.spec, rank=world.rank, of_step=products)


def decide_execution(replica: Replica, feed: Feed, *, recorder: Recorder, can_overlap: Callable[[], bool]) -> None:
    """Choose eager, compiled or captured steps for this rank, and record why.

    `can_overlap` says whether the all-reduce overlaps with the backward pass; in captured steps it does not.
    """

    def record(decision: Decision) -> None:
        is_mixed = decision.value == "graph" and replica.recipe.policy_spec.shares_steps and can_overlap()
        reason = f"{decision.reason}; {_EAGER_GRADIENTS}" if is_mixed else decision.reason
        recorder.event(decision.kind, value=decision.value, reason=reason, **decision.details)

    samples = _num_first(replica, feed)
    record(choose_execution(replica, lambda: _first_batch(replica, feed), samples=samples, on_decision=record))


def _num_first(replica: Replica, feed: Feed) -> int:
    return min(replica.batch_size, feed.num_samples)


def _first_batch(replica: Replica, feed: Feed, *, at_most: int | None = None) -> PackedBatch:
    """Samples for trials of the step; the first epoch uses them again."""
    feed.start_epoch(in_order(feed.num_samples), 0)
    samples = _num_first(replica, feed)
    return packed_batch_of(feed, Batch(0, samples if at_most is None else min(at_most, samples)))
