"""All averages of one rank behind one interface: of parameters and of gradients, on any backend.

Decides which averager a backend uses; with one rank there is nothing to average. Called by the driver and `RankLife`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

from outrider.average.arena_layout import plain_tensors
from outrider.average.averager import Averager
from outrider.average.broadcast import StateBroadcast, take_mean
from outrider.average.checks import Verifier
from outrider.average.device_average import DeviceAverager
from outrider.average.exchange import Exchange
from outrider.average.gradient_average import GradientAverage, are_in_pieces, gradient_average
from outrider.average.host_average import HostAverager
from outrider.average.layout_change import carried_over, layout_of_saved
from outrider.average.optimizer_state import OptimizerArena
from outrider.average.own_arena import OwnArena
from outrider.average.rank_facts import Settled
from outrider.average.resting import content_hash
from outrider.average.transport.backend_table import BackendSpec, backend_spec
from outrider.errors import ConfigError, WaitError
from outrider.policy.policies import LOCAL_STEP_POLICIES
from outrider.rank.layout_watch import LayoutSizes, LayoutWatch, NewLayout, joins, sizes_of, wait_for
from outrider.rank.solo_averages import SoloAverages
from outrider.rank.window import BATCHES, NUM_FACTS
from outrider.replica import state_transfer
from outrider.replica.finite import average_not_finite, gradient_not_finite
from outrider.replica.rank_replica import RankReplica
from outrider.world.world import World


class Averages(Protocol):
    """The interface that the driver needs."""

    @property
    def transport(self) -> str: ...

    watches_gradients: bool
    """Whether averaging detects gradients that are not finite."""

    @property
    def sizes(self) -> LayoutSizes: ...

    def start_from_rank_zero(self) -> None: ...
    def saw_gradients(self) -> None: ...
    def stepped(self) -> None: ...
    def wants_layout(self, *, is_thorough: bool = False) -> bool: ...
    def ended(self) -> None: ...
    def lay_out(self, *, catch_up: Callable[[], int | None], is_within_pass: bool) -> NewLayout: ...
    def lay_out_as(self, *, changing: Sequence[str], trained: Sequence[str] | None = None) -> None: ...
    def average(self, samples: int, facts: Sequence[float]) -> Settled: ...
    @property
    def can_overlap(self) -> bool: ...
    def overlapped(self, samples: int) -> AbstractContextManager[None]: ...
    def average_gradients(self, samples: int, facts: Sequence[float]) -> None: ...
    def drop_bad_gradients(self) -> None: ...
    def gradient_facts(self) -> Settled: ...
    def refuse_not_finite(self, settled: Settled, *, step: int, scaled: Collection[int] = ()) -> None: ...
    def begin(self, samples: int, facts: Sequence[float]) -> None: ...
    def is_ready(self) -> bool: ...
    def load(self) -> Settled: ...
    def correct(self) -> Settled: ...
    def confer(self, samples: int, facts: Sequence[float]) -> Settled: ...
    def hand_over(self, source: int, *, at: int, with_loop: bool = False) -> None: ...
    def move_to_lookahead(self) -> None: ...
    def move_to_average(self) -> None: ...
    def wait_for_device(self) -> None: ...
    @property
    def is_unmerged(self) -> bool: ...
    def merge(self, samples: int, facts: Sequence[float], *, may_undo: bool) -> Settled: ...
    def undo_merge(self) -> None: ...
    def state(self) -> dict[str, Any] | None: ...
    def restore(self, state: dict[str, Any] | None) -> None: ...
    def close(self) -> None: ...


def make_averages(replica: RankReplica, world: World, *, backend: str | BackendSpec, verify: bool) -> Averages:
    if world.size == 1:
        return SoloAverages(replica)
    _refuse_sparse_optimizers(replica)
    return GroupAverages(replica, world, backend=backend_spec(backend), verify=verify)


def _refuse_sparse_optimizers(replica: RankReplica) -> None:
    shares_steps = replica.recipe.policy_spec.shares_steps
    if shares_steps and any(isinstance(one, torch.optim.SparseAdam) for one in replica.optimizers):
        raise ConfigError(
            "SparseAdam takes sparse gradients, and in shared steps every rank gets the mean gradient, which is dense",
            hint=f"use Adam, or a policy whose ranks step with their own gradients: {', '.join(LOCAL_STEP_POLICIES)}",
        )


class GroupAverages:
    """Averages with the other ranks; collectives run in the same order on all of them."""

    watches_gradients = True

    def __init__(self, replica: RankReplica, world: World, *, backend: BackendSpec, verify: bool) -> None:
        self._layout = LayoutWatch(replica, world)
        self._replica = replica
        self._world = world
        self._backend = backend
        self._collective = world.collective_for(backend)
        # On one host, the cores that compute also sum: an overlap costs more than it saves (2.4 % for ResNet-50).
        self._pays_to_overlap = backend.on_device or not world.is_one_host
        # Ranks wait for each other on the host, so that no device is kept busy.
        self._words = (
            world.collective_for("cpu", what="word of their arrival") if backend.on_device else self._collective
        )
        self._verifier = Verifier(world.rank, self._collective.gather) if verify else None
        self._open_exchanges()
        self._names = [str(spec) for spec in world.specs]
        self._batches_by_rank = [0.0] * world.size
        self._has_optimizer = False
        self._optimizer_arena: OptimizerArena | None = None
        self._kept: OwnArena | None = None
        self._samples_apart = 0
        """This rank's samples before the undone merge."""
        self.is_unmerged = False
        """Whether the last merge, which was only for a checkpoint, is undone."""

    def _open_exchanges(self) -> None:
        """Create everything that depends on the layout of the arena."""
        replica, world = self._replica, self._world
        device = replica.device if self._backend.on_device else torch.device("cpu")
        self._exchange = Exchange(
            replica.arena,
            rank=world.rank,
            world_size=world.size,
            num_facts=NUM_FACTS,
            outer=replica.compensation.outer,
            device=device,
            wire=replica.recipe.wire,
        )
        self._shared: GradientAverage | None = None
        self._averager = self._make_averager()
        self._broadcast = StateBroadcast(
            replica.arena,
            self._collective,
            words=self._words,
            device=self._exchange.device,
            timeout_s=world.timeout_s,
        )
        self._measure()

    def _measure(self) -> None:
        shares_steps = self._replica.recipe.policy_spec.shares_steps
        self._sizes = sizes_of(
            self._replica.arena,
            num_bytes=self._exchange.num_bytes,
            gradient_bytes=self._gradients.num_bytes if shares_steps else 0,
        )

    @property
    def _gradients(self) -> GradientAverage:
        """Created with the first shared gradients: policies of local steps need no memory for them."""
        if self._shared is None:
            self._shared = gradient_average(
                self._replica.arena,
                self._collective,
                num_facts=NUM_FACTS,
                device=self._exchange.device,
                in_pieces=self._sums_pieces,
                timeout_s=self._world.timeout_s,
            )
        return self._shared

    @property
    def _sums_pieces(self) -> bool:
        world = self._world
        return are_in_pieces(self._replica.arena, is_on_cpus=world.is_on_cpus, is_one_host=world.is_one_host)

    def _make_averager(self) -> Averager:
        await_others = partial(self._words.gather, [self._world.rank])
        make = partial(DeviceAverager, await_others=await_others) if self._backend.on_device else HostAverager
        return make(self._exchange, self._collective, verify=self._verifier, timeout_s=self._world.timeout_s)

    @property
    def sizes(self) -> LayoutSizes:
        """Sizes of the layout, computed once, because every average records what it sent."""
        return self._sizes

    @property
    def transport(self) -> str:
        """The transport of sums: shared memory, gloo or nccl."""
        return self._collective.transport

    def start_from_rank_zero(self) -> None:
        """Broadcast rank 0's parameters and buffers; they are the first common point."""
        self._broadcast.arena(0)
        self._broadcast.resting(0)
        self._exchange.reset_ref()
        self._layout.restart()

    # The averaged tensors may change between two segments: parameters are frozen and thawed, buffers begin to change.

    def saw_gradients(self) -> None:
        self._layout.saw_gradients()

    def stepped(self) -> None:
        self._layout.stepped()

    def wants_layout(self, *, is_thorough: bool = False) -> bool:
        return self._layout.wants_change(is_thorough=is_thorough)

    def ended(self) -> None:
        self._layout.ended()

    def lay_out(self, *, catch_up: Callable[[], int | None], is_within_pass: bool) -> NewLayout:
        """Agree on the tensors to average from now on; all ranks call this.

        `catch_up` is called before anything changes; it returns the rank that trained alone, if any.
        """
        agreed = self._layout.agree(is_within_pass=is_within_pass)
        if agreed.is_new:
            source = catch_up()
            if self._replica.recipe.policy_spec.averages:
                self._make_equal([*agreed.thawed, *agreed.changing], source=source)
            self.lay_out_as(changing=[*self._replica.arena.layout.changing, *agreed.changing], trained=agreed.trained)
        return agreed

    def lay_out_as(self, *, changing: Sequence[str], trained: Sequence[str] | None = None) -> None:
        """Rebuild the arena and all that depends on it; tensors that stay keep their common point and velocity."""
        self.wait_for_device()
        state, before = self._exchange.state_dict(), self._replica.arena.layout
        if self._optimizer_arena is not None:
            self._optimizer_arena.dissolve()
        self._averager.close()
        self._replica.lay_out(changing=changing, trained=trained)
        self._open_exchanges()
        after = self._replica.arena.layout
        self._exchange.load_state_dict(
            carried_over(state, before=before, after=after, fresh=self._exchange.state_dict())
        )
        # Optimizer state joins again once every rank has some for the thawed parameters.
        self._batches_by_rank, self._has_optimizer = [0.0] * self._world.size, False
        self._optimizer_arena, self._kept = None, None
        self._layout.restart()

    def _make_equal(self, names: Collection[str], *, source: int | None) -> None:
        """Make joining tensors equal on all ranks; they differ only if they were trained before.

        They become their mean, or a copy from `source` if that rank trained alone.
        """
        tenants = [tenant for tenant in self._replica.arena.layout.resting if joins(tenant, names)]
        tensors = [plain for tenant in tenants for plain in plain_tensors(tenant.current())]
        hashes = self._world.exchange_json([content_hash(tensor) for tensor in tensors], name="tensors that join")
        different = [
            tensor for tensor, told in zip(tensors, zip(*hashes, strict=True), strict=True) if len(set(told)) > 1
        ]
        if source is None:
            take_mean(different, self._collective, device=self._exchange.device)
        else:
            self._broadcast.tensors(different, source)

    def average(self, samples: int, facts: Sequence[float]) -> Settled:
        return self._saw(self._averager.average(samples, facts))

    def overlapped(self, samples: int) -> AbstractContextManager[None]:
        """Context manager around a gradient, whose all-reduce may begin before the gradient is complete."""
        return self._gradients.overlapped(samples) if self.can_overlap else contextlib.nullcontext()

    @property
    def can_overlap(self) -> bool:
        """Whether the all-reduce of a gradient may begin before the gradient is complete."""
        return self._pays_to_overlap and self._replica.can_overlap and self._gradients.can_overlap

    def average_gradients(self, samples: int, facts: Sequence[float]) -> None:
        """Give every rank the mean gradient; on a GPU this is queued without waiting."""
        self._gradients.average(samples, facts)

    def drop_bad_gradients(self) -> None:
        """Zero the mean gradient if a rank's gradient is not finite, so that no update uses it before the error."""
        self._gradients.drop_bad()

    def gradient_facts(self) -> Settled:
        """The facts exchanged with the gradients; waits until the device has reached this point."""
        return self._gradients.facts()

    def refuse_not_finite(self, settled: Settled, *, step: int, scaled: Collection[int] = ()) -> None:
        """Raise on all ranks if a rank brought a gradient that is not finite to a shared step; the error names it.

        Ignores `scaled` ranks: with loss scaling such a gradient is an overflow, and the step is skipped.
        """
        for rank in set(settled.not_finite) - set(scaled):
            raise gradient_not_finite(rank=rank, name=self._names[rank], step=step)

    def begin(self, samples: int, facts: Sequence[float]) -> None:
        self._averager.begin(samples, facts)

    def is_ready(self) -> bool:
        return self._averager.is_ready()

    def load(self) -> Settled:
        return self._saw(self._averager.load())

    def correct(self) -> Settled:
        return self._saw(self._averager.correct())

    def confer(self, samples: int, facts: Sequence[float]) -> Settled:
        """Exchange only the facts of all ranks."""
        rows = self._broadcast.facts([samples, *facts])
        return Settled(facts=tuple(row[1:] for row in rows), total_samples=round(sum(row[0] for row in rows)))

    def hand_over(self, source: int, *, at: int, with_loop: bool = False) -> None:
        """Copy the state of `source` to all ranks, as if they had taken its steps.

        `with_loop`: also what a user's loop sets besides parameters and optimizer state, because the loops of other
        ranks have fallen behind. Otherwise each rank keeps its own ticks, rates and gradients.
        """
        replica = self._replica
        is_source = replica.rank == source
        own = state_transfer.pack(replica, with_loop=with_loop) if is_source else state_transfer.Cargo(0, b"", ())
        received = self._broadcast.everything(
            source,
            facts=[own.steps],
            manifest=own.manifest,
            places=lambda manifest: own.tensors if is_source else state_transfer.places(replica, manifest),
        )
        if not is_source:
            (steps,) = received.facts[source]
            state_transfer.take_over(
                replica, state_transfer.Cargo(round(steps), received.manifest, received.tensors), at=at
            )

    def move_to_lookahead(self) -> None:
        """Move the parameters from the average to the point where training continues."""
        self._kept, self.is_unmerged = None, False
        self.wait_for_device()
        self._exchange.move_to_lookahead()
        self.wait_for_device()

    def move_to_average(self) -> None:
        """Move the parameters to the average: evaluation, checkpoints and results use the plain mean of the ranks."""
        self.wait_for_device()
        self._exchange.move_to_average()
        self.wait_for_device()

    # A checkpoint in the middle of shared steps holds the merged model; the run then continues without the merge.

    def merge(self, samples: int, facts: Sequence[float], *, may_undo: bool) -> Settled:
        """Average what shared steps keep per rank; `samples` counts from the last merge that was not undone."""
        samples += self._samples_apart
        self._kept, self._samples_apart = None, 0
        if may_undo:
            self.wait_for_device()
            common, arena = self._exchange.state_dict(), self._replica.arena
            self._kept = OwnArena.of(arena, common, self._optimizer_arena, samples=samples)
        # Ranks that shared steps have equal parameters, which a rounded average would change.
        self._exchange.is_exact = True
        try:
            return self.average(samples, facts)
        finally:
            self._exchange.is_exact = False

    def undo_merge(self) -> None:
        """Undo the last merge, if possible; all ranks call this."""
        if self._kept is not None:
            self._kept.put_back(self._replica.arena, self._exchange, self._optimizer_arena)
            self._samples_apart = self._kept.samples
            self._kept, self.is_unmerged = None, True

    def _saw(self, settled: Settled) -> Settled:
        self._refuse_average(settled)
        self._replica.saw_ranks(settled.effective_ranks)
        if self._replica.recipe.average_optimizer and not self._has_optimizer:
            self._await_optimizers(settled)
        return settled

    def _refuse_average(self, settled: Settled) -> None:
        """Raise if a rank brought parameters that are not finite."""
        if self._replica.rank in settled.not_finite:
            self._replica.check_loss()
        for rank in settled.not_finite:
            raise average_not_finite(rank=rank, name=self._names[rank])

    def _await_optimizers(self, settled: Settled) -> None:
        """Attach optimizer state once every rank has some; all ranks decide this from the same facts."""
        for rank, row in enumerate(settled.facts):
            self._batches_by_rank[rank] += row[BATCHES]
        if min(self._batches_by_rank) > 0:
            self._attach_optimizer()

    def _attach_optimizer(self) -> None:
        self._optimizer_arena = OptimizerArena(self._replica.optimizer, parameters=self._replica.arena.parameters)
        self._exchange.attach(self._optimizer_arena)
        self._measure()
        self._has_optimizer = True
        self._replica.forget_captures()  # the state has moved

    def wait_for_device(self) -> None:
        wait_for(self._replica.device)

    def state(self) -> dict[str, Any] | None:
        common = self._exchange.state_dict()
        arena, samples = self._replica.arena, self._samples_apart
        own = OwnArena.of(arena, common, None, samples=samples).state() if self.is_unmerged else None
        return common | {"has_optimizer": self._has_optimizer, "own": own}

    def restore(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        # A checkpoint is taken after an average, so its optimizer state is common to all ranks.
        if state["has_optimizer"] and self._replica.recipe.average_optimizer:
            self._attach_optimizer()
        saved = layout_of_saved(state["fingerprint"], self._replica.model, after := self._replica.arena.layout)
        if saved is not after:
            state = carried_over(state, before=saved, after=after, fresh=self._exchange.state_dict()) | {"own": None}
        self._exchange.load_state_dict(state)
        own = state["own"]
        # With another world size, the checkpoint holds no arena for each rank: ranks continue from the merged model.
        if own is not None and state["recent_samples"].numel() == self._exchange.world_size:
            OwnArena.restored(own, state).put_back(self._replica.arena, self._exchange, None)
            self._samples_apart, self.is_unmerged = own["samples"], True

    def close(self) -> None:
        # Only a rank that lost its peers can hang here, in a collective that ends with the process.
        with contextlib.suppress(WaitError):
            self._averager.close()
