"""torchft's LocalSGD and DiLoCo, as its documentation and examples have them.

Decides what torchft decides: a quorum at every average, of parameters (LocalSGD) or of the way since the last one,
taken by an outer optimizer (DiLoCo). Collected by `table`; torchft is imported in ranks only.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from outrider.bench.peers.lighthouse import open_manager
from outrider.bench.peers.method import Method
from outrider.bench.peers.peer import INSTALL, Peer
from outrider.replica.replica import Replica
from outrider.runtime.rank import RunSetting
from outrider.runtime.world import World

HAS_WHEEL = (sys.platform, platform.machine()) == ("linux", "x86_64")
FROM_SOURCE = "pip install torchft, which needs Rust here: it has wheels for Linux on x86_64 only"
# Of torchft's examples for LocalSGD (local_sgd_integ_test.py) and for DiLoCo (train_diloco.py).
PERIOD = 2
DILOCO_PERIOD = 20
DILOCO_OUTER_RATE = 0.7
DILOCO_OUTER_MOMENTUM = 0.9
# A shorter memory, for runs of a few epochs.
TUNED_PERIOD = 20
TUNED_OUTER_RATE = 1.0
TUNED_OUTER_MOMENTUM = 0.5


@contextmanager
def torchft_local_sgd(replica: Replica, world: World, setting: RunSetting, *, period: int) -> Iterator[Method]:
    from torchft.local_sgd import LocalSGD

    group = world.group_for(setting.backend)
    with (
        open_manager(replica, world, backend=setting.backend) as manager,
        LocalSGD(manager, replica.model, replica.optimizer, sync_every=period) as local_sgd,
    ):
        yield Method(
            model=replica.model,
            group=group,
            averages=manager.current_step,
            epoch=partial(_synced_at_the_end, local_sgd),
        )


@contextmanager
def _synced_at_the_end(local_sgd: Any) -> Iterator[None]:
    """torchft leaves it open what is evaluated between two averages: here it is one more."""
    yield
    local_sgd.sync()


@contextmanager
def torchft_diloco(
    replica: Replica, world: World, setting: RunSetting, *, period: int, rate: float, momentum: float
) -> Iterator[Method]:
    from torchft.local_sgd import DiLoCo

    group = world.group_for(setting.backend)
    outer = torch.optim.SGD(replica.model.parameters(), lr=rate, momentum=momentum, nesterov=True)
    with (
        open_manager(replica, world, backend=setting.backend) as manager,
        DiLoCo(manager, [replica.model], replica.optimizer, outer, sync_every=period, backup_device=world.device),
    ):
        common = _CommonPoint(replica, manager)
        yield Method(
            model=replica.model,
            group=group,
            averages=manager.current_step,
            after_step=common.keep_up,
            as_one_model=common.shown,
        )


class _CommonPoint:
    """The parameters after the last outer step: DiLoCo's model, from which the ranks have gone on by themselves."""

    def __init__(self, replica: Replica, manager: Any) -> None:
        self._parameters = list(replica.model.parameters())
        self._manager = manager
        self._step = 0
        self._values = self._copies()

    def keep_up(self) -> None:
        if self._manager.current_step() != self._step:
            self._step = self._manager.current_step()
            self._values = self._copies()

    @contextmanager
    def shown(self) -> Iterator[None]:
        local = self._copies()
        self._assign(self._values)
        yield
        self._assign(local)

    def _copies(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def _assign(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)


def _local_sgd_peer(name: str, note: str, *, period: int) -> Peer:
    return Peer(
        name=name,
        title="torchft's LocalSGD",
        note=note,
        open_method=partial(torchft_local_sgd, period=period),
        extra="torchft",
        install=INSTALL if HAS_WHEEL else FROM_SOURCE,
    )


def _diloco_peer(name: str, note: str, *, period: int, rate: float, momentum: float) -> Peer:
    return Peer(
        name=name,
        title="torchft's DiLoCo",
        note=f"{note}: every {period} steps an outer Nesterov step (learning rate {rate:g}, momentum {momentum:g}); "
        "evaluated is the model of the last outer step",
        open_method=partial(torchft_diloco, period=period, rate=rate, momentum=momentum),
        extra="torchft",
        install=INSTALL if HAS_WHEEL else FROM_SOURCE,
    )


TORCHFT_LOCAL_SGD = _local_sgd_peer(
    "torchft-local-sgd",
    f"as torchft's example has it: parameters averaged every {PERIOD} steps, and at the end of each epoch for the "
    "evaluation; a quorum for each average",
    period=PERIOD,
)
TORCHFT_LOCAL_SGD_TUNED = _local_sgd_peer(
    "torchft-local-sgd-tuned",
    f"parameters averaged every {TUNED_PERIOD} steps and at the end of each epoch; a quorum for each average",
    period=TUNED_PERIOD,
)
TORCHFT_DILOCO = _diloco_peer(
    "torchft-diloco",
    "as torchft's example has it",
    period=DILOCO_PERIOD,
    rate=DILOCO_OUTER_RATE,
    momentum=DILOCO_OUTER_MOMENTUM,
)
TORCHFT_DILOCO_TUNED = _diloco_peer(
    "torchft-diloco-tuned",
    "with a shorter memory, for runs of few epochs",
    period=TUNED_PERIOD,
    rate=TUNED_OUTER_RATE,
    momentum=TUNED_OUTER_MOMENTUM,
)
