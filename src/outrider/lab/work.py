"""What effects do in the lab: real replicas in one process, averaged with the runtime's own arithmetic.

Decides nothing about time or order; the clockwork calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.average.collective import meet
from outrider.average.exchange import Exchange
from outrider.average.gradients import GradientExchange
from outrider.average.optimizer_state import OptimizerArena
from outrider.core.effects import Batch
from outrider.data.feed import Feed, make_feed
from outrider.replica import handover
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica


class ReplicaWork:
    """Steps and averages of all ranks' replicas, all starting from rank 0's parameters."""

    def __init__(self, recipe: Recipe, *, world_size: int) -> None:
        cpu = torch.device("cpu")
        self.recipe = recipe
        self.size = world_size
        self.random_states: list[torch.Tensor] = []
        self.replicas: list[Replica] = []
        for rank in range(world_size):
            self.replicas.append(Replica(recipe, device=cpu, rank=rank, name="lab"))
            self.random_states.append(torch.get_rng_state())
        for replica in self.replicas[1:]:
            replica.model.load_state_dict(self.replicas[0].model.state_dict())
        self.exchanges = [
            Exchange(
                replica.arena,
                rank=replica.rank,
                world_size=world_size,
                num_facts=0,
                outer=replica.compensation.outer,
            )
            for replica in self.replicas
        ]
        self._effective_ranks = 1.0
        self.gradients = [
            GradientExchange(replica.arena, rank=replica.rank, world_size=world_size, num_facts=0)
            for replica in self.replicas
        ]
        self.feed: Feed = make_feed(recipe.dataset, device=cpu, seed=recipe.seed, augment=recipe.augment)
        self.epoch_base = 0
        self._pending_at = [0] * world_size
        self._samples_by_rank = [0] * world_size
        self._attached: set[int] = set()

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
            for exchange in self.gradients:
                exchange.settle()
        for replica, at in zip(self.replicas, self._pending_at, strict=True):
            replica.update(at=at)

    # One rank has nobody to average with: its parameters are left alone, to the bit.

    def snapshot(self, rank: int) -> None:
        if self.size > 1:
            self.exchanges[rank].snapshot()

    def settle(self, samples: Sequence[int]) -> float | None:
        if self.size == 1:
            return None
        for rank, (exchange, count) in enumerate(zip(self.exchanges, samples, strict=True)):
            exchange.pack(count, [])
            self._samples_by_rank[rank] += count
        meet(self.exchanges)
        settled = [exchange.settle() for exchange in self.exchanges]
        self._effective_ranks = settled[0].effective_ranks
        return settled[0].drift

    def load(self, rank: int) -> None:
        if self.size > 1:
            self.exchanges[rank].load()
            self._took_in(rank)

    def correct(self, rank: int) -> None:
        if self.size > 1:
            self.exchanges[rank].correct()
            self._took_in(rank)

    def step_back(self) -> None:
        if self.size > 1:
            for exchange in self.exchanges:
                exchange.step_back()

    def step_ahead(self) -> None:
        if self.size > 1:
            for exchange in self.exchanges:
                exchange.step_ahead()

    def merge(self, samples: Sequence[int]) -> None:
        for rank in range(self.size):
            self.snapshot(rank)
        self.settle(samples)
        for rank in range(self.size):
            self.load(rank)

    @torch.no_grad()
    def hand_over(self, source: int, at: int) -> None:
        """The arenas share a layout, so the source's numbers are copied as they lie."""
        giver = self.replicas[source]
        cargo = handover.pack(giver)
        for replica in self.replicas:
            if replica is giver:
                continue
            for dtype, flat in replica.arena.flats.items():
                flat.copy_(giver.arena.flats[dtype])
            for own, given in zip(replica.arena.integers, giver.arena.integers, strict=True):
                own.copy_(given)
            handover.take_over(replica, cargo, at=self.epoch_base + at)

    def _took_in(self, rank: int) -> None:
        self.replicas[rank].saw_ranks(self._effective_ranks)
        self._attach_optimizer(rank)

    def _attach_optimizer(self, rank: int) -> None:
        """Optimizer state joins once every rank has some, after the average that told so."""
        if self.recipe.average_optimizer and rank not in self._attached and min(self._samples_by_rank) > 0:
            self.exchanges[rank].attach(OptimizerArena(self.replicas[rank].optimizer))
            self._attached.add(rank)


class _own_randomness:
    """Each rank draws from its own stream, as processes would."""

    def __init__(self, states: list[torch.Tensor], rank: int) -> None:
        self._states, self._rank = states, rank

    def __enter__(self) -> None:
        torch.set_rng_state(self._states[self._rank])

    def __exit__(self, *_: object) -> None:
        self._states[self._rank] = torch.get_rng_state()
