"""Combines the losses of a user's loop: the loss of a step is the sum of the losses passed to backward.

Decides the weights of losses of accumulated gradients. `LossSums` keeps the sums and finds losses that are not finite.
"""

from __future__ import annotations

import torch

from outrider.replica.loss_sums import LossSums


class LoopLosses:
    """Adds the losses of successive steps, with any number of backward passes and batches per step.

    Gradients add up over a step, and so do its losses: four batches with a quarter of their loss each are one step with
    the mean loss of the four. A step has the weight of the samples in its batches.
    """

    def __init__(self, sums: LossSums) -> None:
        self._sums = sums
        self._first: tuple[torch.Tensor, int] | None = None
        """The first loss of this step, and the samples of its batch."""
        self._so_far: torch.Tensor | None = None
        """Sum of this step's losses, each times the samples of its batch; created at the second loss."""
        self._num_batches = self._num_samples = 0
        self._is_new_batch = True

    def end_pass(self) -> None:
        """Take out the losses of a step that was accumulated but not taken: only a part of its sum is there."""
        if self._first is not None:
            if self._so_far is None:
                total = self._first[0].double() * self._first[1]
            else:
                total = self._so_far * self._num_batches
            self._sums.remove_total(total, self._num_samples)
        self._begin_step()

    def _begin_step(self) -> None:
        self._first, self._so_far = None, None
        self._num_batches = self._num_samples = 0

    def saw_batch(self) -> None:
        self._is_new_batch = True

    def saw_step(self) -> None:
        """End a step that an optimizer took or a GradScaler skipped: the next loss belongs to the next step."""
        self._begin_step()
        # A second step with the same batch, as in a GAN, has the same weight as the first.
        self._is_new_batch = True

    def add(self, loss: torch.Tensor, samples: int, step: int) -> None:
        """Add a loss that was passed to backward, of a batch with this number of samples."""
        loss = loss.detach().reshape(())
        self._num_batches += self._is_new_batch
        self._num_samples += samples if self._is_new_batch else 0
        if self._first is None:
            self._first = loss, samples
            self._sums.add(loss, samples, step)
        else:
            self._add_more(loss, samples, step)
        self._is_new_batch = False

    def _add_more(self, loss: torch.Tensor, samples: int, step: int) -> None:
        """Add a further loss, so that the step's total is the sum of its losses times its number of batches."""
        assert self._first is not None
        before = self._so_far if self._so_far is not None else self._first[0].double() * self._first[1]
        weighted = loss.double() * samples
        more = weighted * self._num_batches + (before if self._is_new_batch else 0.0)
        self._so_far = before + weighted
        self._sums.add_total(more, samples if self._is_new_batch else 0, step, loss=loss)
