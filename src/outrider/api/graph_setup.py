"""`setup()`: one call turns a graph, or any module, into multi-device training in the user's own loop.

Decides nothing: it opens a session, creates the optimizer, prepares both and prints the devices.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Unpack

import torch
from torch import nn

from outrider.api.options import SessionOptions
from outrider.api.run_talk import RunTalk
from outrider.api.session import Session
from outrider.errors import ConfigError
from outrider.policy.policies import DEFAULT_POLICY, policy_spec
from outrider.replica.recipe import OptimizerFactory, SchedulerFactory


def setup(
    model: nn.Module,
    *,
    optimizer: OptimizerFactory,
    scheduler: SchedulerFactory | None = None,
    **options: Unpack[SessionOptions],
) -> Session:
    """Open a session on all devices and prepare `model` in place; the loop is the same for one device or many.

    `with outrider.setup(graph, optimizer=lambda p: torch.optim.SGD(p, 0.1)) as s:` closes it at the end.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"setup() needs a torch.nn.Module, got {type(model).__name__}", hint="call build() on a flow first"
        )
    session = Session(**options).open()
    try:
        made = _make_optimizer(optimizer, model.to(session.device).parameters())
        session.prepare(model, made, *([] if scheduler is None else [scheduler(made)]))
    except BaseException as error:
        session.__exit__(type(error), error, error.__traceback__)
        raise
    # If the session prints its own line at the start, that line has the same facts.
    quiet = options.get("quiet", "auto")
    if session.is_main and quiet is not True and not RunTalk.open(quiet).is_on:
        print(_facts(session, policy_spec(options.get("policy", DEFAULT_POLICY)).name), file=sys.stderr)
    return session


def _make_optimizer(factory: OptimizerFactory, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if not callable(factory):
        raise ConfigError(
            f"optimizer must be a function from parameters to an optimizer, got {type(factory).__name__}",
            hint="pass optimizer=lambda p: torch.optim.SGD(p, 0.1)",
        )
    return factory(parameters)


def _facts(session: Session, policy: str) -> str:
    """Describe the hardware in one line."""
    if session.world_size == 1:
        return f"outrider: 1 rank on {_describe(session.device)}, {torch.get_num_threads()} threads"
    assert session.backend is not None
    ranks = ", ".join(session.devices)
    return (
        f"outrider: {session.world_size} ranks on {ranks}; policy {policy}, averages over {session.backend.backend} "
        f"({session.backend.reason})"
    )


def _describe(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
