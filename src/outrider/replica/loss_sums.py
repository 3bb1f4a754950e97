"""Sums losses, and detects losses and updates that are not finite.

Decides when they are read: at once on a CPU; on a GPU only when the host waits for the device anyway.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from outrider.errors import StepError
from outrider.replica.finite import RATE_HINT, Checked, gradient_not_finite


@dataclass(frozen=True, kw_only=True, slots=True)
class BadSteps:
    """The first step whose loss was not finite, and the first after which parameters were not finite."""

    loss: int | None
    update: int | None


class LossSums:
    """Loss times samples since the last drain; on a GPU the sum stays at a fixed address until it is read."""

    def __init__(self, device: torch.device) -> None:
        self._is_host = device.type == "cpu"
        self._sum = 0.0
        self._samples = 0
        self._device_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._bad = torch.full((2,), -1, dtype=torch.int64, device=device)
        self._bad_step, self._bad_update = self._bad
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._step_written = 0
        self._watch = _Watch(self._bad) if device.type == "cuda" else None
        self._sum_watch = _SumWatch(self._device_sum) if device.type == "cuda" else None
        self._told = (0.0, 0)

    def add(self, loss: torch.Tensor, samples: int, step: int) -> None:
        self._samples += samples
        if not self._is_host:
            self.at(step)
            self._add_on_device(loss.detach().reshape(()), samples)
            return
        value = loss.item()
        self._sum += value * samples
        self._check_on_host(value, step)

    def add_total(self, total: torch.Tensor, samples: int, step: int, *, loss: torch.Tensor) -> None:
        """Add a sum of several losses times samples; `loss` is the new one among them."""
        self._samples += samples
        if not self._is_host:
            self.at(step)
            self._device_sum.add_(total)
            self._mark(self._bad_step, loss)
            return
        self._sum += total.item()
        self._check_on_host(loss.item(), step)

    def remove_total(self, total: torch.Tensor, samples: int) -> None:
        """Take out a sum of losses times samples that was added before."""
        self._samples -= samples
        if self._is_host:
            self._sum -= total.item()
        else:
            self._device_sum.sub_(total)

    def _check_on_host(self, value: float, step: int) -> None:
        if not math.isfinite(value) and self._bad_step.item() < 0:
            self._bad_step.fill_(step)

    def _add_on_device(self, loss: torch.Tensor, samples: int) -> None:
        self._device_sum.add_(loss.double(), alpha=samples)
        self._mark(self._bad_step, loss)

    def saw_update(self, probe: torch.Tensor) -> None:
        """Part of a step on a GPU: `probe` is finite if all parameters are finite after the update."""
        self._mark(self._bad_update, probe)

    def _mark(self, first_bad: torch.Tensor, value: torch.Tensor) -> None:
        is_first_bad = ~torch.isfinite(value) & (first_bad < 0)
        first_bad.copy_(torch.where(is_first_bad, self._step, first_bad))

    # The step number is also on the device, so that a captured step can increment it.

    def at(self, step: int) -> None:
        """Set the step of the following losses."""
        if step != self._step_written:
            self._step.fill_(step)
            self._step_written = step

    def count_on(self) -> None:
        """Advance the step number on the device; part of a captured step."""
        self._step.add_(1)

    def counted_on(self, samples: int) -> None:
        """Count the samples of a replayed step."""
        self._samples += samples
        self._step_written += 1

    def captured(self, samples: int) -> None:
        """Remove the samples of a step that was captured but not run."""
        self._samples -= samples

    @property
    def has_losses(self) -> bool:
        """Whether losses were added since the last drain."""
        return self._samples > 0

    def bad_steps(self) -> BadSteps:
        """The bad steps so far; waits for a GPU."""
        return _bad_steps(self._bad)

    def bad_steps_so_far(self) -> BadSteps:
        """Like `bad_steps`, but without waiting: the state of the GPU at the previous call."""
        return self.bad_steps() if self._watch is None else self._watch.look()

    def mean_so_far(self) -> float | None:
        """Mean loss since the last drain; waits for a GPU."""
        return (self._sum + float(self._device_sum)) / self._samples if self._samples else None

    def since_last(self) -> tuple[float, int]:
        """Sum and samples since the last call of this method, without waiting: on a GPU as far as the host knows."""
        now = (self._sum, self._samples) if self._sum_watch is None else self._sum_watch.look(self._samples)
        before, self._told = self._told, now
        samples = now[1] - before[1]
        # Losses that were taken out may be more than those that came.
        return (now[0] - before[0], samples) if samples > 0 else (0.0, 0)

    def drain(self) -> tuple[float, int]:
        """Sum of losses times samples, and the samples, since the last drain."""
        taken = (self._sum + float(self._device_sum), self._samples)
        self._sum, self._samples, self._told = 0.0, 0, (0.0, 0)
        self._device_sum.zero_()
        if self._sum_watch is not None:
            self._sum_watch.forget()
        return taken


def _bad_steps(numbers: torch.Tensor) -> BadSteps:
    loss, update = (step if step >= 0 else None for step in numbers.tolist())
    return BadSteps(loss=loss, update=update)


class _Watch:
    """Numbers on a CUDA device that are copied to the host asynchronously."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers
        self._copy = torch.full(numbers.shape, -1, dtype=numbers.dtype, pin_memory=True)
        self._is_there = torch.cuda.Event()
        self._known = BadSteps(loss=None, update=None)

    def look(self) -> BadSteps:
        """The values of the last copy if it is complete; starts the next copy."""
        if self._is_there.query():
            self._known = _bad_steps(self._copy)
            self._copy.copy_(self._numbers, non_blocking=True)
            self._is_there.record()
        return self._known


class _SumWatch:
    """A sum on a CUDA device that is copied to the host asynchronously, with its samples at that time."""

    def __init__(self, total: torch.Tensor) -> None:
        self._total = total
        self._copy = torch.zeros((), dtype=total.dtype, pin_memory=True)
        self._is_there = torch.cuda.Event()
        self._samples: int | None = None
        self._known = (0.0, 0)

    def look(self, samples: int) -> tuple[float, int]:
        """The sum and samples of the last copy that is complete; starts the next copy."""
        if self._is_there.query():
            if self._samples is not None:
                self._known = (float(self._copy), self._samples)
            self._copy.copy_(self._total, non_blocking=True)
            self._is_there.record()
            self._samples = samples
        return self._known

    def forget(self) -> None:
        """Ignore a copy in flight, because the sum starts anew."""
        self._known, self._samples = (0.0, 0), None


def refuse_bad(bad: BadSteps, replica: Checked) -> None:
    """Raise an error if a loss or an update was not finite at some step."""
    rank, name = replica.rank, replica.name
    if bad.update is not None and (bad.loss is None or bad.update < bad.loss):
        raise gradient_not_finite(rank=rank, name=name, step=bad.update)
    if bad.loss is None:
        return
    # On a CPU the loss is checked before the update, so it was computed with the present parameters.
    if bad.loss > 0 and replica.steps == bad.loss and not replica.finite.is_finite():
        raise gradient_not_finite(rank=rank, name=name, step=bad.loss - 1)
    raise StepError(
        f"rank {rank} ({name}), step {bad.loss}: the loss is not finite", hint=RATE_HINT, rank=rank, step=bad.loss
    )
