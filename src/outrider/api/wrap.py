"""`wrap()`: manual averages, for training that fits no policy: reinforcement learning, EMA models, unusual GANs.

Decides whether to use the ranks of the open session or to open one. The user decides when to average.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Unpack

from torch import nn

from outrider.api.hand_averages import open_averages
from outrider.api.options import SessionOptions
from outrider.api.run_talk import RunTalk
from outrider.api.session import Session, open_session
from outrider.average.arena import Arena
from outrider.errors import ConfigError


def wrap(model: nn.Module, **options: Unpack[SessionOptions]) -> Wrapped:
    """Wrap a model for manual averages; moves it to this rank's device and sets it to rank 0's parameters.

    Inside a session it uses the ranks of the session; otherwise it opens a session with `options` and closes it.
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
        wrapped = Wrapped(model, session, owns_session=True)
    except BaseException as error:
        session.__exit__(type(error), error, error.__traceback__)
        raise
    assert session.backend is not None
    talk = RunTalk.open(options.get("quiet", "auto"), is_main=session.is_main)
    talk.wrapped(session.devices, backend=session.backend)
    return wrapped


class Wrapped:
    """A model and its averages; every rank must call the same averages in the same order."""

    def __init__(self, model: nn.Module, session: Session, *, owns_session: bool) -> None:
        self.session = session
        self.module = model.to(session.device)
        self._owns_session = owns_session
        assert session.backend is not None
        self._primitives = open_averages(
            Arena(self.module, takes_all=True), world=session.world, backend=session.backend, what="what was wrapped"
        )
        self.broadcast()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)

    def average_gradients(self, *, samples: int) -> None:
        """Replace the gradients of all ranks by their mean, weighted by samples."""
        _check(samples)
        if self._primitives is not None:
            self._primitives.average_gradients(samples)

    def average_parameters(self, *, samples: int) -> None:
        """Replace the parameters of all ranks by their mean, weighted by the samples since the last average."""
        _check(samples)
        if self._primitives is not None:
            self._primitives.average_parameters(samples)

    def average_buffers(self, *, samples: int) -> None:
        """Average float buffers likewise; BatchNorm variances become those of the mixture, counters the maximum."""
        _check(samples)
        if self._primitives is not None:
            self._primitives.average_buffers(samples)

    def broadcast(self, *, source: int = 0) -> None:
        """Send the parameters and buffers of one rank to all."""
        if not 0 <= source < self.session.world_size:
            raise ConfigError(
                f"source must be a rank, 0 to {self.session.world_size - 1}, got {source}", hint="0 is the main rank"
            )
        if self._primitives is not None:
            self._primitives.broadcast(source)

    def close(self) -> None:
        """End the session if this object opened it."""
        if self._owns_session:
            self.session.close()

    def __enter__(self) -> Wrapped:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._owns_session:
            self.session.__exit__(kind, error, traceback)


def _check(samples: int) -> None:
    if samples < 0:
        raise ConfigError(f"samples must be 0 or more, got {samples}", hint="pass the samples that this rank took")
