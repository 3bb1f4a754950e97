"""Evaluation divided among ranks: each takes batches from a common cursor, so a fast device evaluates more.

Decides the size of an evaluation batch; the numbers are combined with the epoch's metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outrider import faults
from outrider.data.feed import Feed
from outrider.data.leases import Leases, LocalLeases, OpenLeases
from outrider.data.order import in_order
from outrider.policy.effects import Lease, Take
from outrider.replica.evaluation_mode import evaluating
from outrider.replica.replica import Replica

BATCHES_PER_LEASE = 4
EvaluateAll = Callable[[Any, Any], torch.Tensor | float]
"""The evaluation function of a user's own loop: gets the model, or the list of several, and a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSums:
    """One rank's part: the sum of batch means times samples."""

    total: float = 0.0
    samples: int = 0
    seconds: float = 0.0
    catch_up_s: float = 0.0
    """Part of `seconds`: the time to bring lagging ranks up to date."""


class Evaluation:
    """The user's evaluate function over the evaluation data set; `batch_size` is that of its DataLoader, if any."""

    def __init__(
        self,
        replica: Replica,
        feed: Feed,
        open_leases: OpenLeases,
        *,
        world_size: int,
        batch_size: int | None = None,
    ) -> None:
        self._replica = replica
        self._feed = feed
        self._open_leases = open_leases
        self._share = 1 / world_size
        # Without a backward pass, twice the training batch fits in memory.
        self._batch_size = batch_size or max(256, 2 * replica.batch_size)
        feed.start_epoch(in_order(feed.num_samples), 0)

    def run(self, key: str, *, catch_up_s: float = 0.0, is_alone: bool = False) -> EvaluationSums:
        """Evaluate this rank's part, or all of it; `key` names the evaluation, the same on all ranks.

        `catch_up_s` is the time already spent to bring ranks up to date for it.
        """
        faults.reach("evaluation")
        span = Lease(0, self._feed.num_samples)
        # A rank alone does not need the store.
        leases: Leases = (
            LocalLeases(span, batch_size=self._batch_size)
            if is_alone
            else self._open_leases(key, span, batch_size=self._batch_size)
        )
        started_s = time.perf_counter()
        total, samples = 0.0, 0
        wanted = Take(BATCHES_PER_LEASE * self._batch_size, share=self._share)
        while (lease := leases.take(wanted)) is not None:
            batches = tuple(lease.batches(self._batch_size))
            self._feed.announce(batches)
            for batch in batches:
                total += self._replica.evaluate(self._feed.fetch(batch)) * batch.count
                samples += batch.count
        seconds = catch_up_s + time.perf_counter() - started_s
        return EvaluationSums(total=total, samples=samples, seconds=seconds, catch_up_s=catch_up_s)


@torch.no_grad()
def evaluate_all(
    function: EvaluateAll, models: Sequence[nn.Module], feed: Feed, leases: Leases, *, batch_size: int, share: float
) -> EvaluationSums:
    """This rank's part of an evaluation in a user's own loop."""
    faults.reach("evaluation")
    total, samples = 0.0, 0
    with evaluating(models):
        while (lease := leases.take(Take(BATCHES_PER_LEASE * batch_size, share=share))) is not None:
            for batch in lease.batches(batch_size):
                value = function(models[0] if len(models) == 1 else models, feed.fetch(batch))
                total += float(value) * batch.count
                samples += batch.count
    return EvaluationSums(total=total, samples=samples)
