"""The losses of a user's loop, as its mean loss counts them: a step's loss is the sum of what was passed to backward.

Decides what the losses of accumulated gradients weigh. `LossSums` keeps the sums and finds losses that are not finite.
"""

from __future__ import annotations

import torch

from outrider.replica.loss_sums import LossSums


class LoopLosses:
    """Adds the losses of one step after the other, however many backward passes and batches a step has.

    Gradients add up over a step, and so do its losses: four batches with a quarter of their loss each are one step with
    the mean loss of the four. A step weighs as many samples as its batches have.
    """

    def __init__(self, sums: LossSums) -> None:
        self._sums = sums
        self._first: tuple[torch.Tensor, int] | None = None
        """The first loss of this step, and the samples of its batch."""
        self._so_far: torch.Tensor | None = None
        """Losses of this step, each times the samples of its batch; made when there is a second one."""
        self._num_batches = 0
        self._is_new_batch = True

    def open_pass(self) -> None:
        """The means of an epoch begin anew; a step that goes on from the pass before counts as a new one."""
        self._first, self._so_far, self._num_batches = None, None, 0

    def saw_batch(self) -> None:
        self._is_new_batch = True

    def saw_step(self) -> None:
        """An optimizer stepped, or a GradScaler skipped that: the next loss is of the next step."""
        self._first, self._so_far, self._num_batches = None, None, 0
        # A second step with the same batch, as in a GAN, weighs as much as the first.
        self._is_new_batch = True

    def add(self, loss: torch.Tensor, samples: int, step: int) -> None:
        """A loss that was passed to backward, of a batch with so many samples."""
        loss = loss.detach().reshape(())
        self._num_batches += self._is_new_batch
        if self._first is None:
            self._first = loss, samples
            self._sums.add(loss, samples, step)
        else:
            self._add_more(loss, samples, step)
        self._is_new_batch = False

    def _add_more(self, loss: torch.Tensor, samples: int, step: int) -> None:
        """So that the total of the step is the sum of its losses times its number of batches."""
        assert self._first is not None
        before = self._so_far if self._so_far is not None else self._first[0].double() * self._first[1]
        weighted = loss.double() * samples
        more = weighted * self._num_batches + (before if self._is_new_batch else 0.0)
        self._so_far = before + weighted
        self._sums.add_total(more, samples if self._is_new_batch else 0, step, loss=loss)
