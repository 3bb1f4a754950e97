"""What a rank finds out about its step before training: the memory format, and how the step runs.

Decides which samples are tried; the choices themselves are the replica's, and go to the timeline with their reasons.
Called once per rank, when it is set up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from outrider.core.effects import Batch, Decision
from outrider.data.feed import Feed
from outrider.data.order import in_order
from outrider.data.parcel import Parcel, parcel_of
from outrider.replica.execution import choose_execution
from outrider.replica.replica import Replica
from outrider.replica.tuning import FormatChoice, agree, choose_memory_format
from outrider.runtime.world import World
from outrider.timeline.recorder import Recorder

# On two slices of a GPU ResNet-34 stood still in channels_last, and never in the model's own format (docs/log.md). Most
# likely cuDNN's BatchNorm for channels_last waits inside its kernel for multiprocessors that neighbours hold.
_ON_A_SLICE = FormatChoice(
    value="contiguous", reason="on a slice, kernels of channels_last can wait for ever for what its neighbours hold"
)


def agree_on_format(replica: Replica, feed: Feed, *, world: World, devices: Sequence[str], recorder: Recorder) -> None:
    """Ranks that sum flat arenas need one layout; a world without CUDA devices has nothing to gain from another."""
    if replica.recipe.memory_format != "auto" or not any(name.startswith("cuda") for name in devices):
        return
    if world.spec.share is None:
        mine = choose_memory_format(replica, _first_batch(replica, feed).batch())
    else:
        mine = _ON_A_SLICE
    told = world.exchange_json(asdict(mine), name="memory formats")
    choice = agree([FormatChoice(**fields) for fields in told])
    if choice.value == "channels_last":
        replica.use_channels_last()
    if world.rank == 0:
        recorder.event("memory format", value=choice.value, reason=choice.reason)


def decide_execution(replica: Replica, feed: Feed, *, recorder: Recorder) -> None:
    """Each rank by itself, on its own device."""

    def record(decision: Decision) -> None:
        recorder.event(decision.kind, value=decision.value, reason=decision.reason, **decision.details)

    samples = _num_first(replica, feed)
    record(choose_execution(replica, lambda: _first_batch(replica, feed), samples=samples, on_decision=record))


def _num_first(replica: Replica, feed: Feed) -> int:
    return min(replica.recipe.batch_size, feed.num_samples)


def _first_batch(replica: Replica, feed: Feed) -> Parcel:
    """Samples to try the step on; they come again in the first epoch."""
    feed.start_epoch(in_order(feed.num_samples), 0)
    return parcel_of(feed, Batch(0, _num_first(replica, feed)))
