"""Sums of losses, and the watch for a loss that is not finite.

Decides when the loss may be read: at once on the CPU; on a GPU only when somebody waits for the device anyway.
"""

from __future__ import annotations

import math

import torch

from outrider.errors import StepError


class LossTally:
    """Loss times samples since the last drain; on a GPU the sum stays there, in one place, until it is read."""

    def __init__(self, device: torch.device) -> None:
        self._is_host = device.type == "cpu"
        self._sum = 0.0
        self._samples = 0
        self._device_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._bad_step = torch.full((), -1, dtype=torch.int64, device=device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._step_written = 0
        self._watch = _Watch(self._bad_step) if device.type == "cuda" else None

    def add(self, loss: torch.Tensor, samples: int, step: int) -> None:
        self._samples += samples
        if not self._is_host:
            self.at(step)
            self._add_on_device(loss.detach().reshape(()), samples)
            return
        value = loss.item()
        self._sum += value * samples
        if not math.isfinite(value) and self._bad_step.item() < 0:
            self._bad_step.fill_(step)

    def _add_on_device(self, loss: torch.Tensor, samples: int) -> None:
        self._device_sum.add_(loss.double(), alpha=samples)
        is_first_bad = ~torch.isfinite(loss) & (self._bad_step < 0)
        self._bad_step.copy_(torch.where(is_first_bad, self._step, self._bad_step))

    # The number of the step lives on the device too, so that a captured step can count it on.

    def at(self, step: int) -> None:
        """The losses that come belong to this step."""
        if step != self._step_written:
            self._step.fill_(step)
            self._step_written = step

    def count_on(self) -> None:
        """The step is over: part of a captured step."""
        self._step.add_(1)

    def counted_on(self, samples: int) -> None:
        """A captured step of so many samples was replayed."""
        self._samples += samples
        self._step_written += 1

    def captured(self, samples: int) -> None:
        """A step was captured and not done: its samples do not count."""
        self._samples -= samples

    def bad_step(self) -> int | None:
        """The first step whose loss was not finite; waits for a GPU."""
        step = int(self._bad_step.item())
        return step if step >= 0 else None

    def bad_step_so_far(self) -> int | None:
        """The same without waiting: what a GPU had found when this was asked before."""
        return self.bad_step() if self._watch is None else self._watch.look()

    def mean_so_far(self) -> float | None:
        """Mean loss since the last drain; waits for a GPU."""
        return (self._sum + float(self._device_sum)) / self._samples if self._samples else None

    def drain(self) -> tuple[float, int]:
        """Sum of losses times samples, and the samples, since the last call."""
        taken = (self._sum + float(self._device_sum), self._samples)
        self._sum, self._samples = 0.0, 0
        self._device_sum.zero_()
        return taken


class _Watch:
    """A number on a CUDA device that is copied to the host behind its back."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number = number
        self._copy = torch.full((), -1, dtype=number.dtype, pin_memory=True)
        self._is_there = torch.cuda.Event()
        self._known: int | None = None

    def look(self) -> int | None:
        """What the last copy brought, where it has arrived; then ask for the next."""
        if self._is_there.query():
            step = int(self._copy)
            self._known = step if step >= 0 else None
            self._copy.copy_(self._number, non_blocking=True)
            self._is_there.record()
        return self._known


def refuse_bad(step: int | None, *, rank: int, name: str) -> None:
    """Raise where a loss was not finite at some step; `name` is the device as the user wrote it."""
    if step is not None:
        raise StepError(
            f"rank {rank} ({name}), step {step}: the loss is not finite",
            hint="lower the learning rate, or set max_grad_norm",
            rank=rank,
            step=step,
        )
