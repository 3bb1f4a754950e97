"""Validation and test data of Lightning on several ranks: every batch goes to one rank, and every rank gets one.

Decides which rank evaluates which batch. Lightning's own sampler would repeat samples so that all ranks have equally
many; here faster ranks take more batches, and none is taken twice. Called by both strategies of Lightning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from outrider.data.order import shuffled
from outrider.errors import ConfigError
from outrider.integrations.lightning_ranks import LightningRanks
from outrider.policy.effects import Lease, Take
from outrider.rank.epoch_accounting import open_leases

_PASSED_ON = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)
"""Arguments of a DataLoader that the loader of a rank takes over."""


class DividedLoader:
    """A loader of evaluation data that all ranks share; each pass hands out its batches anew."""

    def __init__(self, loader: DataLoader[Any], ranks: LightningRanks) -> None:
        self.loader = loader
        self.dataset, self.batch_size = loader.dataset, loader.batch_size
        self._ranks = ranks
        self._batches: list[list[int]] = []
        self._numbered: DataLoader[Any] | None = None

    def __len__(self) -> int:
        """Batches of all ranks together: as many as one device has, or one for each rank."""
        return max(len(self.loader), self._ranks.world_size)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.dataset, IterableDataset) or self.loader.batch_sampler is None:
            yield from self._every_nth()
            return
        self._batches = self._drawn()
        yield from self._own_loader()

    def _own_loader(self) -> DataLoader[Any]:
        """One loader for all passes, so that persistent workers stay."""
        if self._numbered is None:
            settings = {name: getattr(self.loader, name) for name in _PASSED_ON}
            self._numbered = DataLoader(self.dataset, batch_sampler=_Taken(self), **settings)
        return self._numbered

    def taken(self) -> Iterator[list[int]]:
        """This rank's batches: the one with its number, then whatever is left when it asks."""
        ranks, batches = self._ranks, self._batches
        yield batches[ranks.rank]
        world = ranks.opened.world
        span = Lease(world.size, len(batches) - world.size)
        if not span.count:
            return
        leases = open_leases(world, ranks.next_key(), span, batch_size=1)
        while (lease := leases.take(Take(1, share=1 / world.size))) is not None:
            yield batches[lease.start]

    def _drawn(self) -> list[list[int]]:
        """The batches of this pass, the same on all ranks."""
        ranks, sampler = self._ranks, self.loader.batch_sampler
        ranks.before_meeting("evaluation")
        is_plain = type(sampler) is BatchSampler
        order = _plain_order(sampler.sampler, self.loader) if is_plain else None  # type: ignore[union-attr]
        if order is None:
            drawn = [list(batch) for batch in sampler] if ranks.rank == 0 else None  # type: ignore[union-attr]
            batches: list[list[int]] = ranks.broadcast(drawn)
        else:
            size = sampler.batch_size  # type: ignore[union-attr]
            batches = [order[at : at + size] for at in range(0, len(order), size)]
            batches = batches[:-1] if sampler.drop_last and len(order) % size else batches  # type: ignore[union-attr]
        if len(batches) < ranks.world_size:
            batches = _cut([index for batch in batches for index in batch], ranks.world_size)
        return batches

    def _every_nth(self) -> Iterator[Any]:
        """Of a stream every rank reads all and keeps its part; batches cannot be handed out before they are read."""
        ranks, number = self._ranks, -1
        ranks.before_meeting("evaluation")
        for number, batch in enumerate(self.loader):
            if number % ranks.world_size == ranks.rank:
                yield batch
        if number < ranks.rank:
            raise ConfigError(
                f"the evaluation data has {number + 1} batches for {ranks.world_size} ranks, and Lightning waits for "
                "logs of every rank",
                hint="use a smaller batch_size for evaluation, so that every rank gets a batch",
            )


class _Taken:
    """The batch sampler of one rank."""

    def __init__(self, divided: DividedLoader) -> None:
        self._divided = divided

    def __iter__(self) -> Iterator[list[int]]:
        return self._divided.taken()


def _plain_order(sampler: Any, loader: DataLoader[Any]) -> list[int] | None:
    """The order of torch's own samplers; None for others, of which only rank 0 draws."""
    num_samples = len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is SequentialSampler:
        return list(range(num_samples))
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == num_samples:
        generator = sampler.generator or loader.generator
        seed = 0 if generator is None else generator.initial_seed()
        return list(shuffled(num_samples, seed=seed, epoch=0).tolist())
    return None


def _cut(indices: Sequence[int], num_parts: int) -> list[list[int]]:
    """Smaller batches where there are fewer than ranks: without a batch a rank would have no logs to reduce."""
    if len(indices) < num_parts:
        raise ConfigError(
            f"{len(indices)} samples to evaluate on {num_parts} ranks, and Lightning waits for logs of every rank",
            hint="evaluate more samples, or use fewer devices",
        )
    return [list(indices[part::num_parts]) for part in range(num_parts)]
