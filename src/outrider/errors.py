"""The errors users see: a message with the values, and a hint with the way out.

OutriderError
├── ConfigError      an option or a value that cannot work
├── DeviceError      a device that is not there or cannot be used
├── DataError        a data set or a file that cannot be used
├── StepError        the user's code, or what it returned, failed in a rank
├── VerifyError      an average was not exact
├── PeerLostError    another rank went away; rarely the cause, so never reported first
└── WaitError        a wait that ended; says what it waited for
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OutriderError(Exception):
    """Base of all errors raised on purpose; `rank` and `step` say where in a run it happened."""

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        traceback: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.rank = rank
        self.step = step
        self.traceback = traceback

    def __str__(self) -> str:
        lines = [self.message]
        if self.traceback:
            lines.append(self.traceback.rstrip())
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class ConfigError(OutriderError, ValueError):
    """An option or a value that cannot work."""


class DeviceError(OutriderError):
    """A device that is not there or cannot be used."""


class DataError(OutriderError):
    """A data set or a file that cannot be used."""


class StepError(OutriderError):
    """The user's code, or what it returned, failed in a rank."""


class VerifyError(OutriderError):
    """An average was not exact."""


class PeerLostError(OutriderError):
    """Another rank went away; rarely the cause, so never reported first."""


class WaitError(OutriderError):
    """A wait that took too long; the message says what was waited for."""


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to a mistyped one, if any is close."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return matches[0] if matches else None


GPU_FAULT = "CUDA error"


def named(error: BaseException) -> str:
    """The type of an error and what it says; of a fault on a GPU the first line, the rest is torch's advice."""
    text = str(error)
    if text.startswith(GPU_FAULT):
        text = text.partition("\n")[0]
    return ": ".join(part for part in (type(error).__name__, text) if part)
