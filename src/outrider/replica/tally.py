"""Sums of losses, and the watch for a loss that is not finite.

Decides when the loss may be read: at once on the CPU; on a GPU only when somebody waits for the device anyway.
"""

from __future__ import annotations

import math

import torch


class LossTally:
    """Loss times samples since the last drain; on a GPU the sum stays there until it is read."""

    def __init__(self, device: torch.device) -> None:
        self._is_host = device.type == "cpu"
        self._sum = 0.0
        self._samples = 0
        self._device_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._bad_step = torch.full((), -1, dtype=torch.int64, device=device)

    def add(self, loss: torch.Tensor, samples: int, step: int) -> None:
        self._samples += samples
        if self._is_host:
            value = loss.item()
            self._sum += value * samples
            if not math.isfinite(value) and self._bad_step.item() < 0:
                self._bad_step.fill_(step)
            return
        detached = loss.detach()
        self._device_sum += detached.double() * samples
        is_first_bad = ~torch.isfinite(detached).reshape(()) & (self._bad_step < 0)
        self._bad_step = torch.where(is_first_bad, step, self._bad_step)

    def bad_step(self) -> int | None:
        """The first step whose loss was not finite; waits for a GPU."""
        step = int(self._bad_step.item())
        return step if step >= 0 else None

    def mean_so_far(self) -> float | None:
        """Mean loss since the last drain; waits for a GPU."""
        return (self._sum + float(self._device_sum)) / self._samples if self._samples else None

    def drain(self) -> tuple[float, int]:
        """Sum of losses times samples, and the samples, since the last call."""
        taken = (self._sum + float(self._device_sum), self._samples)
        self._sum, self._samples = 0.0, 0
        self._device_sum.zero_()
        return taken
