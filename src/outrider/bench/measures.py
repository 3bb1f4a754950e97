"""Numbers from the epochs of one run: speed after the warm-up, time to a target, fractions of the time.

Decides what is warm-up and how epochs are weighted; imports no torch. Called for live runs and for records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from outrider.bench.suite.runs import EpochRow
    from outrider.record.epoch_metrics import EpochMetrics

AnEpoch = TypeVar("AnEpoch", "EpochRow", "EpochMetrics")
"""Of a record, or of a live run."""


def after_warm_up(epochs: Sequence[AnEpoch]) -> Sequence[AnEpoch]:
    """All but the first epoch, in which caches fill and the planner learns the paces; a single epoch stays."""
    return epochs[1:] if len(epochs) > 1 else epochs


def samples_per_s(epochs: Sequence[AnEpoch]) -> float:
    """Of training time, warm-up excluded."""
    counted = after_warm_up(epochs)
    return sum(epoch.samples for epoch in counted) / sum(epoch.seconds for epoch in counted)


def time_to_target_s(epochs: Sequence[AnEpoch], target: float | None, *, larger_is_better: bool = True) -> float | None:
    """Training time, warm-up included, up to the end of the first epoch that reached the target."""
    num_epochs = epochs_to_target(epochs, target, larger_is_better=larger_is_better)
    return None if num_epochs is None else epochs[num_epochs - 1].train_s


def epochs_to_target(epochs: Sequence[AnEpoch], target: float | None, *, larger_is_better: bool = True) -> int | None:
    """How many epochs it took until the evaluation reached the target; None if none did."""
    if target is None:
        return None
    sign = 1.0 if larger_is_better else -1.0
    evals = ((number, epoch.eval) for number, epoch in enumerate(epochs, start=1))
    return next((number for number, value in evals if value is not None and sign * value >= sign * target), None)


def mean_over_time(epochs: Sequence[AnEpoch], name: str) -> float | None:
    """The mean of a field, each counted epoch weighted by its seconds; None if an epoch does not know it."""
    counted = after_warm_up(epochs)
    parts = [(getattr(epoch, name), epoch.seconds) for epoch in counted]
    # What a rank could not measure is NaN while it runs and null in its record.
    if any(value is None or value != value for value, _ in parts):
        return None
    return float(sum(value * seconds for value, seconds in parts) / sum(seconds for _, seconds in parts))
