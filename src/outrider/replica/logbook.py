"""Scalars that user code logs inside its step, averaged over ranks and weighted by samples.

Decides nothing about when they are exchanged: the drivers read and clear the logbook at the end of an epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from outrider.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LogEntries:
    """What a logbook held at some moment."""

    sums: dict[str, torch.Tensor | float]
    weights: dict[str, float]
    slots: frozenset[str]


class Logbook:
    """Weighted sums by name; tensors stay on their device until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor | float] = {}
        self._weights: dict[str, float] = {}
        self._slots: dict[str, torch.Tensor] = {}
        """Sums on a CUDA device, each in one place for good: a captured step adds to it at every replay."""

    def add(self, name: str, value: torch.Tensor | float, weight: float) -> None:
        scalar = value.detach() if isinstance(value, torch.Tensor) else float(value)
        if isinstance(scalar, torch.Tensor) and scalar.numel() != 1:
            raise ConfigError(
                f"log({name!r}, ...) needs a scalar, got a tensor of shape {tuple(scalar.shape)}",
                hint="log its mean",
            )
        if isinstance(scalar, torch.Tensor) and scalar.is_cuda:
            self._slot(name, scalar).add_(scalar.reshape(()).double(), alpha=weight)
        else:
            self._sums[name] = self._sums.get(name, 0.0) + scalar * weight
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def _slot(self, name: str, like: torch.Tensor) -> torch.Tensor:
        if name not in self._slots:
            self._slots[name] = torch.zeros((), dtype=torch.float64, device=like.device)
        return self._slots[name]

    def drain(self) -> dict[str, tuple[float, float]]:
        """Sums and weights by name; the logbook is empty afterwards."""
        taken = {}
        for name, weight in self._weights.items():
            slot = self._slots.get(name)
            taken[name] = (float(self._sums.get(name, 0.0)) + (float(slot) if slot is not None else 0.0), weight)
            if slot is not None:
                slot.zero_()
        self._sums, self._weights = {}, {}
        return taken

    # A captured step logs at every replay; what it adds is told apart from what was logged before.

    def entries(self) -> LogEntries:
        """Names, weights and host sums at this moment."""
        return LogEntries(sums=dict(self._sums), weights=dict(self._weights), slots=frozenset(self._slots))

    def take_back(self, before: LogEntries) -> dict[str, float]:
        """Forget what was logged since, and return its weights by name."""
        since = {name: weight - before.weights.get(name, 0.0) for name, weight in self._weights.items()}
        self._sums, self._weights = dict(before.sums), dict(before.weights)
        return {name: weight for name, weight in since.items() if weight}

    def logged_again(self, weights: Mapping[str, float]) -> None:
        """A captured step added to its slots once more."""
        for name, weight in weights.items():
            self._weights[name] = self._weights.get(name, 0.0) + weight


def merged(books: list[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """The weighted means over all ranks' drained logbooks."""
    means: dict[str, float] = {}
    for name in sorted({name for book in books for name in book}):
        entries = [book[name] for book in books if name in book]
        weight = sum(entry[1] for entry in entries)
        means[name] = sum(entry[0] for entry in entries) / weight if weight else float("nan")
    return means


_active = threading.local()


class writing:
    """Makes a logbook the one that `log()` writes to in this thread."""

    __slots__ = ("_book", "_samples")

    def __init__(self, book: Logbook, *, samples: int) -> None:
        self._book = book
        self._samples = samples

    def __enter__(self) -> None:
        _active.target = (self._book, self._samples)

    def __exit__(self, *_: object) -> None:
        _active.target = None


def log(name: str, value: torch.Tensor | float) -> None:
    """Log a scalar from inside the step function; means over ranks, weighted by samples, appear per epoch."""
    target = getattr(_active, "target", None)
    if target is None:
        raise ConfigError(
            f"log({name!r}, ...) was called outside a step", hint="call outrider.log inside the step function"
        )
    book, samples = target
    book.add(name, value, samples)
