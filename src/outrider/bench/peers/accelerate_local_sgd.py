"""accelerate's LocalSGD, used as in its documentation.

Local steps, with parameters averaged every few steps and at the end of each epoch. Listed in `peer_table`; accelerate
is imported in ranks only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from outrider.bench.peers.method import Method, default_group
from outrider.bench.peers.peer import PeerFramework
from outrider.rank.rank_life import RunSetting
from outrider.replica.replica import Replica
from outrider.world.world import World

# Of the example in accelerate's documentation.
PERIOD = 8
TUNED_PERIOD = 20


@contextmanager
def accelerate_local_sgd(replica: Replica, world: World, setting: RunSetting, *, period: int) -> Iterator[Method]:
    group = default_group(world, backend=setting.backend)
    accelerator = _make_accelerator(world)
    model, replica.optimizer = accelerator.prepare(replica.model, replica.optimizer)
    rounds = _Rounds(accelerator, model, period=period)
    yield Method(
        model=model,
        group=group,
        averages=lambda: rounds.num_averages,
        backward=accelerator.backward,
        after_step=rounds.step,
        epoch=rounds.epoch,
    )
    # It keeps what it prepared, and DDP must be gone before the process group.
    accelerator.free_memory()


def _make_accelerator(world: World) -> Any:
    from accelerate import Accelerator

    num_threads = torch.get_num_threads()
    if world.spec.index is not None:
        # accelerate takes the device of this number.
        os.environ["LOCAL_RANK"] = str(world.spec.index)
    accelerator = Accelerator(cpu=world.device.type == "cpu")
    # It may have changed them, and threads are part of the conditions that all modes share.
    torch.set_num_threads(num_threads)
    return accelerator


class _Rounds:
    """One LocalSGD per epoch."""

    def __init__(self, accelerator: Any, model: Any, *, period: int) -> None:
        self.num_averages = 0
        self._accelerator = accelerator
        self._model = model
        self._period = period
        self._local_sgd: Any = None

    @contextmanager
    def epoch(self) -> Iterator[None]:
        from accelerate.local_sgd import LocalSGD

        with LocalSGD(self._accelerator, self._model, local_sgd_steps=self._period) as self._local_sgd:
            yield
        self.num_averages += self._local_sgd.num_steps // self._period + 1

    def step(self) -> None:
        self._local_sgd.step()


def _peer(name: str, note: str, *, period: int) -> PeerFramework:
    return PeerFramework(
        name=name,
        title="accelerate's LocalSGD",
        note=note,
        open_method=partial(accelerate_local_sgd, period=period),
        extra="accelerate",
    )


ACCELERATE_LOCAL_SGD = _peer(
    "accelerate-local-sgd",
    f"as accelerate's documentation has it: parameters averaged every {PERIOD} steps and at the end of each epoch",
    period=PERIOD,
)
ACCELERATE_LOCAL_SGD_TUNED = _peer(
    "accelerate-local-sgd-tuned",
    f"parameters averaged every {TUNED_PERIOD} steps and at the end of each epoch",
    period=TUNED_PERIOD,
)
