"""Carries out effects in the lab: real replicas in one process, averaged with the same arithmetic as in training.

Decides nothing about time or order; the virtual clock calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from outrider.average.arena_layout import ArenaLayout
from outrider.average.exchange import Exchange
from outrider.average.gradients import GradientExchange
from outrider.average.layout_change import carried_over
from outrider.average.optimizer_state import OptimizerArena
from outrider.average.transport.collective import meet, meet_pieces
from outrider.average.wire_plan import wire_dtype
from outrider.data import randomness
from outrider.data.feed import Feed, make_feed
from outrider.data.randomness import RandomStates
from outrider.errors import ConfigError
from outrider.policy.effects import Batch
from outrider.replica import state_transfer
from outrider.replica.finite import average_not_finite, gradient_not_finite
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica


class ReplicaWork:
    """Does the steps and averages of all ranks' replicas, which start from rank 0's parameters."""

    def __init__(self, recipe: Recipe, *, world_size: int, collate: Callable[[list[Any]], Any] | None = None) -> None:
        cpu = torch.device("cpu")
        self.recipe = recipe
        self.size = world_size
        self.random_states: list[RandomStates] = []
        self.replicas: list[Replica] = []
        for rank in range(world_size):
            self.replicas.append(Replica(recipe, device=cpu, rank=rank, name="lab"))
            self.random_states.append(randomness.capture())
        for replica in self.replicas[1:]:
            replica.model.load_state_dict(self.replicas[0].model.state_dict())
        self._open_exchanges()
        self._effective_ranks = 1.0
        self.feed: Feed = make_feed(
            recipe.dataset,
            device=cpu,
            collate=collate,
            seed=recipe.seed,
            augment=recipe.augment,
            length=recipe.length,
        )
        self.epoch_base = 0
        self._pending_at = [0] * world_size
        self._samples_by_rank = [0] * world_size
        self._attached: set[int] = set()

    def _open_exchanges(self) -> None:
        size = self.size
        self.exchanges = [
            Exchange(
                one.arena,
                rank=one.rank,
                world_size=size,
                num_facts=0,
                outer=one.compensation.outer,
                wire=self.recipe.wire,
            )
            for one in self.replicas
        ]
        self.gradients = [
            GradientExchange(one.arena, rank=one.rank, world_size=size, num_facts=0) for one in self.replicas
        ]

    def lay_out(self) -> None:
        """Update the layout after tensors were frozen or thawed, equally on all replicas; called between segments."""
        layouts = [ArenaLayout(replica.model, changing=replica.arena.layout.changing) for replica in self.replicas]
        if layouts[0].fingerprint == self.replicas[0].arena.fingerprint:
            return
        states = [exchange.state_dict() for exchange in self.exchanges]
        before = self.replicas[0].arena.layout
        for replica, layout in zip(self.replicas, layouts, strict=True):
            if layout.fingerprint != layouts[0].fingerprint:
                raise ConfigError(
                    f"replica {replica.rank} has other frozen parameters than replica 0",
                    hint="freeze and thaw the same parameters on all replicas",
                    rank=replica.rank,
                )
        self._make_equal(set(layouts[0].trained) - set(before.trained))
        for replica, layout in zip(self.replicas, layouts, strict=True):
            replica.lay_out(changing=layout.changing, trained=None)
        self._open_exchanges()
        after = self.replicas[0].arena.layout
        for exchange, state in zip(self.exchanges, states, strict=True):
            fresh = exchange.state_dict()
            exchange.load_state_dict(carried_over(state, before=before, after=after, fresh=fresh))
        self._samples_by_rank, self._attached = [0] * self.size, set()

    @torch.no_grad()
    def _make_equal(self, joining: set[str]) -> None:
        """Replace tensors that replicas trained separately since they were thawed by their mean, as ranks do."""
        for name in sorted(joining):
            tensors = [replica.model.get_parameter(name.split(" = ")[0]) for replica in self.replicas]
            if any(not torch.equal(tensor, tensors[0]) for tensor in tensors):
                total = tensors[0].to(wire_dtype(tensors[0].dtype), copy=True)
                for tensor in tensors[1:]:
                    total += tensor
                for tensor in tensors:
                    tensor.copy_(total / self.size)

    def step(self, rank: int, batch: Batch, at: int) -> None:
        with _own_randomness(self.random_states, rank):
            self.replicas[rank].step(self.feed.fetch(batch), samples=batch.count, at=self.epoch_base + at)

    def gradient(self, rank: int, batch: Batch, at: int) -> None:
        self._pending_at[rank] = self.epoch_base + at
        replica = self.replicas[rank]
        if batch.count == 0:
            replica.no_gradient()
            return
        with _own_randomness(self.random_states, rank):
            replica.gradient(self.feed.fetch(batch), samples=batch.count)

    def share_gradients(self, samples: Sequence[int]) -> None:
        if self.size > 1:
            for exchange, count in zip(self.gradients, samples, strict=True):
                exchange.pack(count, [])
            meet(self.gradients)
            bad = {rank for exchange in self.gradients for rank in exchange.settle().not_finite}
        else:
            scale = self.replicas[0].loss_scale
            bad = {0} if scale is not None and scale.has_overflow else set()
        for rank in bad:
            if self.replicas[rank].loss_scale is None:
                raise gradient_not_finite(rank=rank, name="lab", step=self.replicas[rank].steps)
        for replica, at in zip(self.replicas, self._pending_at, strict=True):
            if bad:
                replica.skip_update(at=at)
            else:
                replica.update(at=at)

    def check_finite(self) -> None:
        for replica in self.replicas:
            replica.check_finite()

    # With one rank, averages leave the parameters bit-identical.

    def snapshot(self, rank: int) -> None:
        self.replicas[rank].check_finite()
        if self.size > 1:
            self.exchanges[rank].snapshot()

    def settle(self, samples: Sequence[int]) -> float | None:
        if self.size == 1:
            return None
        for rank, (exchange, count) in enumerate(zip(self.exchanges, samples, strict=True)):
            exchange.open(count, [])
            self._samples_by_rank[rank] += count
        settled = meet_pieces(self.exchanges)
        for rank in settled[0].not_finite:
            self.replicas[rank].check_loss()
            raise average_not_finite(rank=rank, name="lab")
        self._effective_ranks = settled[0].effective_ranks
        return settled[0].drift

    def load(self, rank: int) -> None:
        if self.size > 1:
            self.exchanges[rank].load()
            self._took_in(rank)

    def correct(self, rank: int) -> None:
        if self.size > 1:
            self.exchanges[rank].add_correction()
            self._took_in(rank)

    def move_to_average(self) -> None:
        if self.size > 1:
            for exchange in self.exchanges:
                exchange.move_to_average()

    def move_to_lookahead(self) -> None:
        if self.size > 1:
            for exchange in self.exchanges:
                exchange.move_to_lookahead()

    def merge(self, samples: Sequence[int]) -> None:
        for rank in range(self.size):
            self.snapshot(rank)
        # After shared steps all ranks have the same parameters, which a rounded average would change.
        for exchange in self.exchanges:
            exchange.is_exact = True
        self.settle(samples)
        for exchange in self.exchanges:
            exchange.is_exact = False
        for rank in range(self.size):
            self.load(rank)

    @torch.no_grad()
    def hand_over(self, source: int, at: int) -> None:
        """Copy the source's state to all replicas; all arenas have the same layout."""
        giver = self.replicas[source]
        cargo = state_transfer.pack(giver)
        for replica in self.replicas:
            if replica is giver:
                continue
            for dtype, flat in replica.arena.flats.items():
                flat.copy_(giver.arena.flats[dtype])
            for own, given in zip(replica.arena.integers, giver.arena.integers, strict=True):
                own.copy_(given)
            state_transfer.take_over(replica, cargo, at=self.epoch_base + at)

    def loss(self, rank: int) -> tuple[float, int]:
        return self.replicas[rank].loss_sums.since_last()

    def _took_in(self, rank: int) -> None:
        self.replicas[rank].saw_ranks(self._effective_ranks)
        self._attach_optimizer(rank)

    def _attach_optimizer(self, rank: int) -> None:
        """Include optimizer state in averages once every rank has some, starting with the next average."""
        if self.recipe.average_optimizer and rank not in self._attached and min(self._samples_by_rank) > 0:
            replica = self.replicas[rank]
            self.exchanges[rank].attach(OptimizerArena(replica.optimizer, parameters=replica.arena.parameters))
            self._attached.add(rank)


class _own_randomness:
    """Each rank has its own random state, as separate processes would."""

    def __init__(self, states: list[RandomStates], rank: int) -> None:
        self._states, self._rank = states, rank

    def __enter__(self) -> None:
        randomness.restore(self._states[self._rank])

    def __exit__(self, *_: object) -> None:
        self._states[self._rank] = randomness.capture()
