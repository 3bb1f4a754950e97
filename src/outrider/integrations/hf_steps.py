"""Where a Trainer's loop is: global steps, what its callbacks asked for, and sums that ranks tell when they meet.

Decides how the steps of ranks become global steps, which count as on one device (with policy `sync`, as with
DistributedDataParallel). Knows no Trainer. Used by `outrider.integrations.huggingface`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

FLAGS = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")


@dataclass(kw_only=True, slots=True)
class StepCount:
    """Global steps of a run, from the samples of the whole world."""

    step_samples: int
    """Samples of an optimizer step of all ranks."""
    steps_per_epoch: int
    epoch: int = 0
    first: int = 0
    """The global step at which the epoch began."""
    seen_before: int = 0
    """Samples of the world before this epoch."""

    def open(self, epoch: int, *, step: int, samples: int) -> None:
        """An epoch begins at this global step, after so many samples of the world."""
        self.epoch, self.first, self.seen_before = epoch, step, samples

    def go_back(self, remaining: list[list[int]] | None, *, num_samples: int) -> None:
        """The epoch began before: only these ranges of its order remain; None: all of it."""
        if remaining is not None:
            position = num_samples - sum(count for _, count in remaining)
            self.first -= -(-position // self.step_samples)

    def after_batch(self, samples_seen: int) -> int:
        """The global step that ends with a batch, which began at so many samples of the world."""
        done = samples_seen - self.seen_before + self.step_samples
        return self.first + min(self.steps_per_epoch, -(-done // self.step_samples))

    def samples_after_batch(self, samples_seen: int, *, num_samples: int) -> int:
        """Samples of the epoch that are done after a step that all ranks took together."""
        return min(num_samples, samples_seen - self.seen_before + self.step_samples)


@dataclass(kw_only=True, slots=True)
class SinceMeeting:
    """What a rank has to tell the others of its steps since they last met."""

    loss: torch.Tensor
    """Sum of losses, each times this rank's part of the step."""
    steps: float = 0.0
    """Sum of these parts."""
    tokens_before: float = 0
    flags: set[str] = field(default_factory=set)

    def add(self, loss: torch.Tensor, part: float) -> None:
        self.loss += loss * part
        self.steps += part

    def saw(self, control: Any) -> None:
        self.flags |= {name for name in FLAGS if getattr(control, name)}


def world_mean(told: list[dict[str, Any]]) -> float | None:
    """The mean loss of all ranks' steps; None if there were none."""
    steps = sum(one["steps"] for one in told)
    return sum(one["loss"] for one in told) / steps if steps else None


def goal_samples(max_steps: int, *, num_samples: int, step_samples: int, steps_per_epoch: int) -> int:
    """Samples of the world in so many steps, as the Trainer counts: an epoch's last step may have fewer."""
    epochs, steps = divmod(max_steps, steps_per_epoch)
    return epochs * num_samples + min(num_samples, steps * step_samples)


def items_to_divide_by(rows: list[list[int]], *, rank: int) -> float | None:
    """The number of items (tokens) by which a rank divides the sum of its losses, so that all ranks' mean is right.

    A row is a rank's samples and items. An average weights ranks by samples, one device would divide the sum of all
    losses by all items.
    """
    samples, items = (sum(row[i] for row in rows) for i in range(2))
    own = rows[rank][0]
    return items * own / samples if own and samples else None
