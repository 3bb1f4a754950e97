"""Scalars that user code logs inside its step, averaged over ranks and weighted by samples.

Does not decide when they are exchanged: the rank and the lab read and clear them at the end of an epoch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from outrider.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LogEntries:
    """A snapshot of the logged scalars."""

    sums: dict[str, torch.Tensor | float]
    weights: dict[str, float]
    slots: frozenset[str]


class LoggedScalars:
    """Weighted sums by name; tensors stay on their device until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor | float] = {}
        self._weights: dict[str, float] = {}
        self._slots: dict[str, torch.Tensor] = {}
        """Sums on a CUDA device at fixed addresses: a captured step adds to them at every replay."""

    def add(self, name: str, value: torch.Tensor | float, weight: float) -> None:
        scalar = _as_scalar(name, value)
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
        """Return sums and weights by name, and clear them."""
        taken = {}
        for name, weight in self._weights.items():
            slot = self._slots.get(name)
            taken[name] = (float(self._sums.get(name, 0.0)) + (float(slot) if slot is not None else 0.0), weight)
            if slot is not None:
                slot.zero_()
        self._sums, self._weights = {}, {}
        return taken

    # A captured step logs at every replay, so its additions are separated from earlier ones.

    def entries(self) -> LogEntries:
        """The current names, weights and host sums."""
        return LogEntries(sums=dict(self._sums), weights=dict(self._weights), slots=frozenset(self._slots))

    def take_back(self, before: LogEntries) -> dict[str, float]:
        """Remove the scalars logged since then, and return their weights by name."""
        since = {name: weight - before.weights.get(name, 0.0) for name, weight in self._weights.items()}
        self._sums, self._weights = dict(before.sums), dict(before.weights)
        return {name: weight for name, weight in since.items() if weight}

    def logged_again(self, weights: Mapping[str, float]) -> None:
        """Count another replay of a captured step."""
        for name, weight in weights.items():
            self._weights[name] = self._weights.get(name, 0.0) + weight


class PendingScalars:
    """The scalars of a step that may have to be repeated; they count when the step is done."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, torch.Tensor | float, float]] = []

    def add(self, name: str, value: torch.Tensor | float, weight: float) -> None:
        scalar = _as_scalar(name, value)
        if isinstance(scalar, torch.Tensor):
            # User code may change the tensor before the step is done.
            scalar = scalar.to(torch.float64 if scalar.is_cuda else scalar.dtype, copy=True)
        self._entries.append((name, scalar, weight))

    def count_in(self, book: LoggedScalars) -> None:
        for name, scalar, weight in self._entries:
            book.add(name, scalar, weight)


def _as_scalar(name: str, value: torch.Tensor | float) -> torch.Tensor | float:
    scalar = value.detach() if isinstance(value, torch.Tensor) else float(value)
    if isinstance(scalar, torch.Tensor) and scalar.numel() != 1:
        raise ConfigError(
            f"log({name!r}, ...) needs a scalar, got a tensor of shape {tuple(scalar.shape)}",
            hint="log its mean",
        )
    return scalar


def merged(accounting: list[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """The weighted means over the drained scalars of all ranks."""
    means: dict[str, float] = {}
    for name in sorted({name for book in accounting for name in book}):
        entries = [book[name] for book in accounting if name in book]
        weight = sum(entry[1] for entry in entries)
        means[name] = sum(entry[0] for entry in entries) / weight if weight else float("nan")
    return means


_active = threading.local()


class writing:
    """Make `log()` write to these scalars in this thread."""

    __slots__ = ("_book", "_samples")

    def __init__(self, book: LoggedScalars | PendingScalars, *, samples: int) -> None:
        self._book = book
        self._samples = samples

    def __enter__(self) -> None:
        _active.target = (self._book, self._samples)

    def __exit__(self, *_: object) -> None:
        _active.target = None


class _Unrecorded:
    def add(self, name: str, value: torch.Tensor | float, samples: int) -> None:
        _as_scalar(name, value)


@contextlib.contextmanager
def not_recording() -> Iterator[None]:
    """Let `log()` record nothing in this thread: a step function may serve as evaluation, too."""
    before = getattr(_active, "target", None)
    _active.target = (_Unrecorded(), 0)
    try:
        yield
    finally:
        _active.target = before


def log(name: str, value: torch.Tensor | float) -> None:
    """Log a scalar from inside the step function; means over ranks, weighted by samples, appear per epoch.

    In a function that evaluates it records nothing.
    """
    target = getattr(_active, "target", None)
    if target is None:
        raise ConfigError(
            f"log({name!r}, ...) was called outside a step", hint="call outrider.log inside the step function"
        )
    book, samples = target
    book.add(name, value, samples)
