"""`wrap()`: averages by hand, for training that fits no policy: reinforcement learning, EMA models, odd GANs.

Decides which world a model is wrapped in: that of the open session, or one of its own. When to average is the user's.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Unpack

import torch
from torch import nn

from outrider.api.options import SessionOptions
from outrider.api.session import Session, open_session
from outrider.average.arena import Arena
from outrider.average.primitives import Primitives
from outrider.errors import ConfigError


def wrap(model: nn.Module, **options: Unpack[SessionOptions]) -> Wrapped:
    """Give a model averages that are called by hand; it moves to this rank's device and to rank 0's parameters.

    Inside a session the session's ranks take part; elsewhere a session is opened with `options` and closed with this.
    """
    session = open_session()
    if session is not None and options:
        raise ConfigError(
            f"wrap() got {', '.join(sorted(options))}, but a session is open and has its own",
            hint="pass the options to outrider.Session",
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(f"wrap() needs a torch.nn.Module, got {type(model).__name__}", hint="pass the model itself")
    if session is not None:
        return Wrapped(model, session, owns_session=False)
    session = Session(**options).open()
    try:
        return Wrapped(model, session, owns_session=True)
    except BaseException as error:
        session.__exit__(type(error), error, error.__traceback__)
        raise


class Wrapped:
    """A model and its averages; every rank calls the same ones in the same order."""

    def __init__(self, model: nn.Module, session: Session, *, owns_session: bool) -> None:
        self.session = session
        self.module = model.to(session.device)
        self._owns_session = owns_session
        self._primitives = _primitives(Arena(self.module), session)
        self.broadcast()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)

    def average_gradients(self, *, samples: int) -> None:
        """Every rank's gradients become the mean, weighted by the samples that each took."""
        _check(samples)
        if self._primitives is not None:
            self._primitives.average_gradients(samples)

    def average_parameters(self, *, samples: int) -> None:
        """Every rank's parameters become the mean, weighted by the samples since the last time."""
        _check(samples)
        if self._primitives is not None:
            self._primitives.average_parameters(samples)

    def average_buffers(self, *, samples: int) -> None:
        """The same for buffers; BatchNorm variances become those of the mixture, counters the largest."""
        _check(samples)
        if self._primitives is not None:
            self._primitives.average_buffers(samples)

    def broadcast(self, *, source: int = 0) -> None:
        """Every rank gets the parameters and buffers of one."""
        if not 0 <= source < self.session.world_size:
            raise ConfigError(
                f"source must be a rank, 0 to {self.session.world_size - 1}, got {source}", hint="0 is the main rank"
            )
        if self._primitives is not None:
            self._primitives.broadcast(source)

    def close(self) -> None:
        """End the session where this opened it."""
        if self._owns_session:
            self.session.close()

    def __enter__(self) -> Wrapped:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._owns_session:
            self.session.__exit__(kind, error, traceback)


def _primitives(arena: Arena, session: Session) -> Primitives | None:
    """None in a world of one, which has nobody to average with."""
    if session.world_size == 1:
        return None
    world, backend = session.world, session.backend
    assert backend is not None
    device = session.device if backend.backend == "nccl" else torch.device("cpu")
    collective = world.collective_for(backend.backend, what="what was wrapped")
    return Primitives(arena, collective, rank=world.rank, world_size=world.size, device=device)


def _check(samples: int) -> None:
    if samples < 0:
        raise ConfigError(f"samples must be 0 or more, got {samples}", hint="pass the samples that this rank took")
