"""Fault points for tests: kills, stops, exceptions, delays, full disks and NaN gradients at named places of a rank.

Decides when a fault is due and triggers it; off unless OUTRIDER_FAULTS is set. Documented in docs/testing.md.
Armed when a rank joins its world. The driver, the world, checkpoints and the run folder call the fault points.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from outrider.errors import ConfigError, nearest
from outrider.policy.effects import Average, Begin, Collect, Effect, Policy, SharedStep, Step, Take

VARIABLE = "OUTRIDER_FAULTS"
EFFECTS: dict[type, tuple[str, ...]] = {
    Take: ("take",),
    Step: ("step",),
    # Its average comes later, when the gradient is there.
    SharedStep: ("step",),
    Average: ("average",),
    Begin: ("begin",),
    Collect: ("collect",),
}
POINTS = (
    "step",
    "data",
    "compute",
    "average",
    "take",
    "begin",
    "collect",
    "checkpoint",
    "checkpoint-write",
    "model-write",
    "record-write",
    "epoch-end",
    "evaluation",
    "store",
)
ACTIONS = ("kill", "stop", "sigterm", "sigint", "exception", "delay", "disk-full", "nan")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "sigterm": signal.SIGTERM, "sigint": signal.SIGINT}


class InjectedFault(RuntimeError):
    """Raised by the action `exception`, in place of an exception of user code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault of one rank."""

    rank: int
    at: str
    do: str
    n: int = 1
    """The first occurrence of `at`, counted from 1 in each rank, at which the fault happens."""
    times: int = 1
    """The number of successive occurrences with the fault; 0 for all from `n` on."""
    seconds: float | None = None
    """Duration of a delay."""
    attempt: int | None = None
    """Only in this attempt of torchrun's restarts; None for every attempt."""

    def __post_init__(self) -> None:
        _check_choice("at", self.at, POINTS)
        _check_choice("do", self.do, ACTIONS)
        if self.n < 1 or self.rank < 0 or self.times < 0:
            raise _refused(f"rank and times must be 0 or more and n 1 or more, got {self}")
        if (self.do == "delay") != (self.seconds is not None):
            raise _refused(f"seconds belongs to do=delay and to nothing else, got do={self.do}")
        if self.do == "nan" and self.at != "step":
            raise _refused(f"do=nan needs at=step, got at={self.at}")

    def is_due(self, count: int) -> bool:
        return self.n <= count and (self.times == 0 or count < self.n + self.times)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read `rank=1,at=step,n=20,do=kill; rank=0,at=checkpoint-write,do=disk-full`."""
    return tuple(_parse_fault(part) for part in text.split(";") if part.strip())


def _parse_fault(text: str) -> Fault:
    kinds = {"at": str, "do": str, "seconds": float}
    names = [field.name for field in fields(Fault)]
    values: dict[str, Any] = {}
    for item in text.split(","):
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator or name not in names or name in values:
            raise _refused(f"{item.strip()!r} is not one of {', '.join(names)} with a value, each given once")
        try:
            values[name] = kinds.get(name, int)(value)
        except ValueError:
            raise _refused(f"{name} must be a number, got {value!r}") from None
    missing = [name for name in ("rank", "at", "do") if name not in values]
    if missing:
        raise _refused(f"{' and '.join(missing)} missing in {text.strip()!r}")
    return Fault(**values)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        close = nearest(value, choices)
        guess = f", did you mean {close}" if close else ""
        raise _refused(f"{name} must be one of {', '.join(choices)}, got {value}{guess}")


def _refused(message: str) -> ConfigError:
    return ConfigError(f"{VARIABLE}: {message}", hint=f"see docs/testing.md, or unset {VARIABLE}")


class _Replica(Protocol):
    """The part of a replica that the action `nan` uses."""

    @property
    def model(self) -> nn.Module: ...


class _Armed:
    """The faults of this process, and how often each of their points was reached."""

    def __init__(self, faults: tuple[Fault, ...], *, rank: int) -> None:
        self._faults = faults
        self._rank = rank
        self._counts = dict.fromkeys(POINTS, 0)

    def reach(self, point: str, *, path: Path | None = None, model: nn.Module | None = None) -> None:
        self._counts[point] += 1
        for fault in self._faults:
            if fault.at == point and fault.is_due(self._counts[point]):
                print(
                    f"outrider: fault on rank {self._rank} at {point} {self._counts[point]}: {fault.do}",
                    file=sys.stderr,
                    flush=True,
                )
                _do(fault, path=path, model=model)


_armed: list[_Armed] = []
"""Holds the faults of this process; empty outside of tests."""


def arm(rank: int, variables: Mapping[str, str] = os.environ) -> None:
    """Read the faults of this rank and reset the counts; called when a rank joins its world."""
    disarm()
    text = variables.get(VARIABLE)
    if text:
        attempt = int(variables.get("TORCHELASTIC_RESTART_COUNT", "0"))
        faults = [fault for fault in parse_faults(text) if fault.attempt in (None, attempt)]
        _armed.append(_Armed(tuple(fault for fault in faults if fault.rank == rank), rank=rank))


def disarm() -> None:
    """Disable faults in this process until it joins another world."""
    _armed.clear()


def reach(point: str) -> None:
    """Report that a named point was reached, and trigger the fault that is due there, if any."""
    if _armed:
        _armed[0].reach(point)


def wrote(path: Path) -> None:
    """Report that a file was written under its temporary name and is not renamed yet."""
    if not _armed:
        return
    if "checkpoints" in path.parts:
        _armed[0].reach("checkpoint-write", path=path)
    elif path.name in ("model.safetensors", "record.json"):
        _armed[0].reach(f"{path.stem}-write", path=path)


def watched(policy: Policy, replica: _Replica) -> Policy:
    """Wrap the policy so that faults are triggered before its effects; without faults return the policy itself."""
    return _with_faults(policy, _armed[0], replica) if _armed else policy


def _with_faults(policy: Policy, armed: _Armed, replica: _Replica) -> Policy:
    result: Any = None
    while True:
        try:
            effect: Effect = policy.send(result)
        except StopIteration:
            return
        for point in _points(effect):
            armed.reach(point, model=replica.model)
        result = yield effect


def _points(effect: Effect) -> Iterator[str]:
    yield from EFFECTS.get(type(effect), ())


def _do(fault: Fault, *, path: Path | None, model: nn.Module | None) -> None:
    if fault.do in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[fault.do])
    elif fault.do == "delay":
        assert fault.seconds is not None
        time.sleep(fault.seconds)
    elif fault.do == "disk-full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), None if path is None else str(path))
    elif fault.do == "exception":
        raise InjectedFault(f"injected at {fault.at}")
    else:
        assert model is not None, "checked: nan is done at a step"
        _spoil_next_gradient(model)


def _spoil_next_gradient(model: nn.Module) -> None:
    """Make the next gradient of the first trained parameter NaN while the loss is finite; not for captured steps."""
    parameter = next(parameter for parameter in model.parameters() if parameter.requires_grad)

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return torch.full_like(gradient, float("nan"))

    handle = parameter.register_hook(spoil)
