"""When checkpoints are due: after a number of epochs, at fractions of an epoch, or by time.

Decides how `checkpoint_every` is parsed and when a checkpoint is due. Does not write checkpoints. Called by the rank;
rank 0's clock counts for all ranks, which learn about it at the next average.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from outrider.errors import ConfigError

DEFAULT_EVERY = "10min"
_UNITS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Every:
    """The interval between checkpoints, in epochs or in seconds; without either, no checkpoints are taken."""

    epochs: float | None = None
    seconds: float | None = None

    @property
    def is_within_epoch(self) -> bool:
        return self.epochs is not None and self.epochs < 1

    def is_due_after(self, epochs: int) -> bool:
        """Whether a checkpoint is due after this number of epochs."""
        return self.epochs is not None and epochs % max(1, round(self.epochs)) == 0


def parse_every(value: float | str | None) -> Every:
    """Parse the option: 2 and 0.5 are epochs, "10min" is a time, None means never."""
    if value is None:
        return Every()
    if isinstance(value, str):
        return Every(seconds=_seconds(value))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise _unreadable(value)
    if value > 1 and value % 1 != 0:
        raise ConfigError(
            f"checkpoint_every must be a whole number of epochs or a part of one, got {value:g}",
            hint="pass checkpoint_every=2 for every second epoch, or 0.5 for twice per epoch",
        )
    return Every(epochs=value)


def _seconds(text: str) -> float:
    match = _TIME.fullmatch(text.lower())
    if match is None or match[2] not in _UNITS_S or float(match[1]) <= 0:
        raise _unreadable(text)
    return float(match[1]) * _UNITS_S[match[2]]


def _unreadable(value: object) -> ConfigError:
    return ConfigError(
        f"checkpoint_every must be a number of epochs > 0 or a time, got {value!r}",
        hint='pass checkpoint_every=1 for every epoch, 0.5 for twice per epoch, "10min" by time, or None for never',
    )


class CheckpointClock:
    """Tells rank 0 that a checkpoint is due by time; the other ranks learn it from rank 0."""

    def __init__(self, every: Every, *, rank: int) -> None:
        self._every_s = every.seconds if rank == 0 else None
        self._last_s = time.monotonic()

    def is_due(self) -> bool:
        return self._every_s is not None and time.monotonic() - self._last_s >= self._every_s

    def saved(self) -> None:
        self._last_s = time.monotonic()
