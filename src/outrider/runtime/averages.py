"""All the averages of one rank behind one face: of parameters and of gradients, on either backend.

Decides which averager serves which backend, and that a world of one averages nothing. Called by the driver only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

from outrider.average.averager import Averager
from outrider.average.checks import Verifier
from outrider.average.device import DeviceAverager
from outrider.average.exchange import Exchange
from outrider.average.facts import Settled
from outrider.average.gradients import GradientExchange
from outrider.average.host import HostAverager
from outrider.average.optimizer_state import OptimizerArena
from outrider.average.overlap import Overlap
from outrider.average.relay import Relay
from outrider.errors import ConfigError, WaitError
from outrider.replica import handover
from outrider.replica.loop_replica import LoopReplica
from outrider.replica.replica import Replica
from outrider.runtime.window import BATCHES, NUM_FACTS
from outrider.runtime.world import World


class Averages(Protocol):
    """What the driver needs."""

    @property
    def transport(self) -> str: ...

    def start_from_rank_zero(self) -> None: ...
    def average(self, samples: int, facts: Sequence[float]) -> Settled: ...
    def overlapped(self, samples: int) -> AbstractContextManager[None]: ...
    def average_gradients(self, samples: int, facts: Sequence[float]) -> None: ...
    def gradient_facts(self) -> Settled: ...
    def begin(self, samples: int, facts: Sequence[float]) -> None: ...
    def is_ready(self) -> bool: ...
    def load(self) -> Settled: ...
    def correct(self) -> Settled: ...
    def confer(self, samples: int, facts: Sequence[float]) -> Settled: ...
    def hand_over(self, source: int, *, at: int) -> None: ...
    def step_ahead(self) -> None: ...
    def step_back(self) -> None: ...
    def wait_for_device(self) -> None: ...
    def state(self) -> dict[str, Any] | None: ...
    def restore(self, state: dict[str, Any] | None) -> None: ...
    def close(self) -> None: ...


def make_averages(replica: Replica | LoopReplica, world: World, *, backend: str, verify: bool) -> Averages:
    if world.size == 1:
        return SoloAverages(replica.device)
    return GroupAverages(replica, world, backend=backend, verify=verify)


class SoloAverages:
    """A world of one: its own facts come back, its parameters are left alone to the bit."""

    transport = "none"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: Settled | None = None

    def start_from_rank_zero(self) -> None: ...

    def average(self, samples: int, facts: Sequence[float]) -> Settled:
        return Settled(facts=(tuple(facts),), total_samples=samples, drift=0.0)

    def overlapped(self, samples: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def average_gradients(self, samples: int, facts: Sequence[float]) -> None:
        self._begun = self.average(samples, facts)

    def gradient_facts(self) -> Settled:
        return self.load()

    def begin(self, samples: int, facts: Sequence[float]) -> None:
        self._begun = self.average(samples, facts)

    def is_ready(self) -> bool:
        return True

    def load(self) -> Settled:
        assert self._begun is not None
        return self._begun

    correct = load

    def confer(self, samples: int, facts: Sequence[float]) -> Settled:
        return self.average(samples, facts)

    def hand_over(self, source: int, *, at: int) -> None: ...

    def step_ahead(self) -> None: ...

    def step_back(self) -> None: ...

    def wait_for_device(self) -> None:
        _wait_for(self._device)

    def state(self) -> dict[str, Any] | None:
        return None

    def restore(self, state: dict[str, Any] | None) -> None: ...

    def close(self) -> None: ...


class GroupAverages:
    """Averages with the other ranks; collectives run in the same order on all of them."""

    def __init__(self, replica: Replica | LoopReplica, world: World, *, backend: str, verify: bool) -> None:
        _check_layouts(replica, world)
        self._replica = replica
        device = replica.device if backend == "nccl" else torch.device("cpu")
        self._collective = world.collective_for(backend)
        self._exchange = Exchange(
            replica.arena,
            rank=world.rank,
            world_size=world.size,
            num_facts=NUM_FACTS,
            outer=replica.compensation.outer,
            device=device,
        )
        self._gradients = GradientExchange(
            replica.arena, rank=world.rank, world_size=world.size, num_facts=NUM_FACTS, device=device
        )
        self._overlap = Overlap(self._gradients, self._collective)
        # On one machine the cores that compute also sum: an overlap costs more than it saves (2.4 % for ResNet-50).
        self._pays_to_overlap = backend == "nccl" or len(set(world.hosts)) > 1
        # Who waits for another does so on the host, and keeps no device busy.
        self._words = (
            self._collective if backend == "cpu" else world.collective_for("cpu", what="word of their arrival")
        )
        self._averager = self._make_averager(world, backend=backend, verify=verify)
        self._relay = Relay(
            replica.arena,
            self._collective,
            words=self._words,
            device=self._exchange.device,
            timeout_s=world.timeout_s,
        )
        self._timeout_s = world.timeout_s
        self._batches_by_rank = [0.0] * world.size
        self._has_optimizer = False

    def _make_averager(self, world: World, *, backend: str, verify: bool) -> Averager:
        verifier = Verifier(world.rank, self._collective.gather) if verify else None
        await_others = partial(self._words.gather, [world.rank])
        make = HostAverager if backend == "cpu" else partial(DeviceAverager, await_others=await_others)
        return make(self._exchange, self._collective, verify=verifier, timeout_s=world.timeout_s)

    @property
    def transport(self) -> str:
        """How sums travel: in shared memory, over gloo or nccl."""
        return self._collective.transport

    def start_from_rank_zero(self) -> None:
        """Everybody gets rank 0's parameters and buffers; they are the first common point."""
        self._relay.arena(0)
        self._exchange.reset_ref()

    def average(self, samples: int, facts: Sequence[float]) -> Settled:
        return self._saw(self._averager.average(samples, facts))

    def overlapped(self, samples: int) -> AbstractContextManager[None]:
        """Around a gradient: its sum may begin before it is complete."""
        return self._overlap.backward(samples) if self._may_overlap else contextlib.nullcontext()

    @property
    def _may_overlap(self) -> bool:
        """After one backward pass, with hooks of its own, whose result nobody changes before it is summed."""
        replica = self._replica
        if not isinstance(replica, Replica) or replica.captured is not None or replica.compiled is not None:
            return False
        recipe = replica.recipe
        return self._pays_to_overlap and recipe.accumulate == 1 and recipe.max_grad_norm is None

    def average_gradients(self, samples: int, facts: Sequence[float]) -> None:
        """Every rank gets the mean gradient; on a device it is queued, and nobody waits."""
        started = self._overlap.take_started()
        started += [self._collective.start_sum_(wire) for wire in self._gradients.pack(samples, facts)]
        self._collective.wait(started)
        if not self._gradients.has_all:
            # Which parameters get one is then read from the device: a lost peer must not make that wait forever.
            self._collective.finish(self._timeout_s)
        self._gradients.hand_out()

    def gradient_facts(self) -> Settled:
        """What the ranks told each other with the gradients; waits until the device has come to this point."""
        self._collective.finish(self._timeout_s)
        return self._gradients.facts()

    def begin(self, samples: int, facts: Sequence[float]) -> None:
        self._averager.begin(samples, facts)

    def is_ready(self) -> bool:
        return self._averager.is_ready()

    def load(self) -> Settled:
        return self._saw(self._averager.load())

    def correct(self) -> Settled:
        return self._saw(self._averager.correct())

    def confer(self, samples: int, facts: Sequence[float]) -> Settled:
        """The facts of all, and nothing else."""
        rows = self._relay.facts([samples, *facts])
        return Settled(facts=tuple(row[1:] for row in rows), total_samples=round(sum(row[0] for row in rows)))

    def hand_over(self, source: int, *, at: int) -> None:
        """Every rank goes on as if it had taken the steps of `source`."""
        replica = self._replica
        assert isinstance(replica, Replica), "in a user's loop nobody rests"
        is_source = replica.rank == source
        own = handover.pack(replica) if is_source else handover.Cargo(0, b"", ())
        relayed = self._relay.everything(
            source,
            facts=[own.steps],
            manifest=own.manifest,
            places=lambda manifest: own.tensors if is_source else handover.places(replica, manifest),
        )
        if not is_source:
            (steps,) = relayed.facts[source]
            handover.take_over(replica, handover.Cargo(round(steps), relayed.manifest, relayed.tensors), at=at)

    def step_ahead(self) -> None:
        """From the average to where training goes on."""
        self.wait_for_device()
        self._exchange.step_ahead()
        self.wait_for_device()

    def step_back(self) -> None:
        """To the average: what is evaluated, saved and handed out is the mean of the ranks, and nothing beyond."""
        self.wait_for_device()
        self._exchange.step_back()
        self.wait_for_device()

    def _saw(self, settled: Settled) -> Settled:
        self._replica.saw_ranks(settled.effective_ranks)
        if self._replica.recipe.average_optimizer and not self._has_optimizer:
            self._await_optimizers(settled)
        return settled

    def _await_optimizers(self, settled: Settled) -> None:
        """Optimizer state joins once every rank has some, which all learn from the same facts."""
        for rank, row in enumerate(settled.facts):
            self._batches_by_rank[rank] += row[BATCHES]
        if min(self._batches_by_rank) > 0:
            self._attach_optimizer()

    def _attach_optimizer(self) -> None:
        self._exchange.attach(OptimizerArena(self._replica.optimizer))
        self._has_optimizer = True
        if isinstance(self._replica, Replica):
            self._replica.forget_captures()  # the state has moved

    def wait_for_device(self) -> None:
        _wait_for(self._replica.device)

    def state(self) -> dict[str, Any] | None:
        return self._exchange.state_dict() | {"has_optimizer": self._has_optimizer}

    def restore(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        # A checkpoint is taken after an average, so the optimizer state that was saved is the common one.
        if state["has_optimizer"] and self._replica.recipe.average_optimizer:
            self._attach_optimizer()
        self._exchange.load_state_dict(state)

    def close(self) -> None:
        # Only a rank that lost its peers can be stuck here, in a collective that ends with the process.
        with contextlib.suppress(WaitError):
            self._averager.close()


def _check_layouts(replica: Replica | LoopReplica, world: World) -> None:
    """Flat arenas are summed element by element: another layout would mix up parameters without a sign."""
    layouts = world.exchange_json(replica.arena.fingerprint, name="layouts")
    for rank, layout in enumerate(layouts):
        if layout != layouts[0]:
            raise ConfigError(
                f"rank {rank} made a model of another layout than rank 0 ({layout:012x}, {layouts[0]:012x})",
                hint="make the same model on every rank: same modules, dtypes and memory formats",
                rank=rank,
            )


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
