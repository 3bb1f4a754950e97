"""The errors that users see: a message with the values, and a hint with a remedy.

OutriderError
├── ConfigError      an option or a value that cannot work
│   └── MissingExtraError    a package of one of the extras is not installed
├── DeviceError      a device that does not exist or cannot be used
├── DataError        a data set or a file that cannot be used
├── StepError        the user's code failed in a rank, or returned an invalid value
├── VerifyError      an average was not exact
├── PeerLostError    the connection to another rank was lost; usually a consequence, so never reported first
└── WaitError        a wait timed out; the message names what it waited for
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OutriderError(Exception):
    """Base of all errors that Outrider raises; `rank` and `step` tell where in a run the error occurred."""

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


class MissingExtraError(ConfigError):
    """A package of one of the extras is not installed."""


class DeviceError(OutriderError):
    """A device that does not exist or cannot be used."""


class DataError(OutriderError):
    """A data set or a file that cannot be used."""


class StepError(OutriderError):
    """The user's code failed in a rank, or returned an invalid value."""


class VerifyError(OutriderError):
    """An average was not exact."""


class PeerLostError(OutriderError):
    """The connection to another rank was lost; usually a consequence, so never reported first."""


class WaitError(OutriderError):
    """A wait timed out; the message names what it waited for."""


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to a mistyped one, if any is close."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, valid: Iterable[str], *, otherwise: str) -> str:
    """The hint for a mistyped name: the closest valid one, or another hint if none is close."""
    close = nearest(name, valid)
    return f"did you mean {close!r}?" if close else otherwise


def one_of(name: str, valid: Iterable[str], *, what: str) -> str:
    """The hint for a mistyped name with all valid ones, the closest first; `what` is their plural."""
    close = nearest(name, valid)
    return f"{f'did you mean {close}? ' if close else ''}{what} are {', '.join(valid)}"


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name of something that does not exist."""
    hint = did_you_mean(name, known, otherwise="pick one of the known names")
    return ConfigError(f"no {what} is called {name!r}, known are: {', '.join(known)}", hint=hint)


GPU_FAULT = "CUDA error"


def named(error: BaseException) -> str:
    """The type and message of an error; for a GPU fault only the first line, because the rest is torch's advice."""
    text = str(error)
    if text.startswith(GPU_FAULT):
        text = text.partition("\n")[0]
    return ": ".join(part for part in (type(error).__name__, text) if part)
