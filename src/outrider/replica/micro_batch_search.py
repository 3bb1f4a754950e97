"""Finds the largest micro-batch that fits in a device's memory, by trial steps that are undone afterwards.

Decides which sizes to try: the whole batch, then halves of it until one fits, then sizes between that and the last one
that did not. A margin stays free for fragmentation and for batches with larger samples. The memory that averages
allocate later is reserved meanwhile. Called once per rank, before training, if `micro_batch` is "auto" and the device
reports when its memory runs out.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.errors import OutriderError
from outrider.policy.effects import Decision
from outrider.replica.gradient_accumulation import first_samples
from outrider.replica.logged_scalars import LoggedScalars
from outrider.replica.loss_sums import LossSums
from outrider.replica.micro_batches import MicroBatches
from outrider.replica.out_of_memory import free_memory, is_out_of_memory
from outrider.replica.replica import Replica
from outrider.replica.snapshot import Snapshot

MARGIN = 0.1
"""Part of the largest micro-batch left free."""
PRECISION = 8
"""The search ends when the range is smaller than this part of the size that fits."""


def find_micro_batch(replica: Replica, batch: Any, *, samples: int, later_bytes: int = 0) -> Decision | None:
    """Set the replica's limit; None if whole batches fit. Steps that fail for other reasons fail in training too.

    `later_bytes` are allocated after the search, so they are not free in training.
    """
    largest = replica.micro_batches.counts(samples)[0]
    trial = _Trial(replica, batch, samples=samples, later_bytes=later_bytes)
    try:
        trial.warm_up()
        if trial.fits(largest) is not False:
            return None
        fitting, failing = _halved(trial, largest)
        limit = _between(trial, fitting, failing)
    finally:
        trial.put_back()
    replica.micro_batches.limit = max(1, limit - int(limit * MARGIN))
    size = replica.micro_batches.counts(samples)[0]
    reason = f"{limit} of {samples} samples fit at once, less a margin; a batch is computed in equal parts"
    return Decision("micro-batch", size, reason, {"largest": limit})


def _halved(trial: _Trial, samples: int) -> tuple[int, int]:
    """A size that fits and one that does not."""
    failing = samples
    while failing > 1 and not trial.fits(failing // 2):
        failing //= 2
    return max(1, failing // 2), failing


def _between(trial: _Trial, fitting: int, failing: int) -> int:
    """The largest size found to fit between one that fits and one that does not."""
    while failing - fitting > max(1, fitting // PRECISION):
        middle = (fitting + failing) // 2
        if trial.fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting


class _Trial:
    """Computes gradients of one replica at several sizes; discards loss sums and logged scalars of the trials."""

    def __init__(self, replica: Replica, batch: Any, *, samples: int, later_bytes: int) -> None:
        self._replica = replica
        self._held = _held(later_bytes, replica.device)
        self._batch = batch
        self._samples = samples
        self._snapshot = Snapshot(replica)
        self._kept = (replica.loss_sums, replica.logged_scalars)
        self._micro_batches, replica.micro_batches = replica.micro_batches, MicroBatches()
        replica.loss_sums, replica.logged_scalars = LossSums(replica.device), LoggedScalars()

    def warm_up(self) -> None:
        """Take one update, so that the optimizer's state occupies memory in the trials as in training."""
        if self.fits(min(2, self._samples)):
            self._replica.update(at=0)

    def fits(self, size: int) -> bool | None:
        """Whether a gradient of this size fits; None if it fails for another reason, which training will report."""
        try:
            self._replica.optimizer.zero_grad(set_to_none=True)
            if size < self._samples:
                # The gradient of earlier micro-batches occupies memory beside the activations.
                self._add_gradient(min(2, size))
            self._add_gradient(size)
            return True
        except OutriderError as error:
            found = False if is_out_of_memory(error) else None
        # The exception is gone here, and so are the frames that held the activations.
        free_memory(self._replica.device)
        return found

    def _add_gradient(self, size: int) -> None:
        batch = first_samples(self._batch, size, samples=self._samples)
        self._replica.compute_gradient(batch, samples=size)

    def put_back(self) -> None:
        self._held = None
        self._replica.loss_sums, self._replica.logged_scalars = self._kept
        self._replica.micro_batches = self._micro_batches
        self._snapshot.restore()
        free_memory(self._replica.device)


def _held(num_bytes: int, device: torch.device) -> torch.Tensor | None:
    """Reserve memory; None if not even this fits, and then the trials can only find that nothing fits."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
