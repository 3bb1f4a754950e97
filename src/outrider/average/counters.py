"""Decides how integer and bool buffers of a model take part in an average: as their maximum over all ranks.

Does not communicate. Called by Exchange.
"""

from __future__ import annotations

import torch

from outrider.average.arena import Arena


class Counters:
    """The integer and bool buffers of a model in one int64 tensor; the ranks take the maximum of `maxima`."""

    def __init__(self, arena: Arena, *, device: torch.device) -> None:
        self._arena = arena
        sizes = [tensor.numel() for tensor in arena.integers]
        self._is_pinned = arena.device.type == "cuda" and device.type == "cpu"
        self._here = torch.zeros(sum(sizes), dtype=torch.int64, device=arena.device)
        self._snapshot = torch.zeros(sum(sizes), dtype=torch.int64, device=device, pin_memory=self._is_pinned)
        self.maxima = torch.zeros_like(self._snapshot, pin_memory=self._is_pinned)
        self._views = [
            view.view(tensor.shape) for view, tensor in zip(torch.split(self._here, sizes), arena.integers, strict=True)
        ]

    def stage(self) -> None:
        if self._views:
            torch._foreach_copy_(self._views, self._arena.integers)

    def fetch(self) -> None:
        if self._views:
            self._snapshot.copy_(self._here, non_blocking=self._is_pinned)

    def pack(self) -> None:
        if self._views:
            self.maxima.copy_(self._snapshot)

    def load(self) -> None:
        if self._views:
            self._here.copy_(self.maxima, non_blocking=self._is_pinned)
            torch._foreach_copy_(self._arena.integers, self._views)

    def correct(self) -> None:
        """Set counters to the maximum plus their own increase since the snapshot."""
        if self._views:
            missed = (self.maxima - self._snapshot).to(self._here.device)
            self.stage()
            self._here.add_(missed)
            torch._foreach_copy_(self._arena.integers, self._views)
