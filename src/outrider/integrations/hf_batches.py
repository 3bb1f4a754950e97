"""The training data of a Trainer as batches of a session: one batch of the session is one optimizer step.

Decides how a `DataLoader` of the Trainer becomes one for `Session.batches()`: gradient accumulation is a larger batch
that comes in micro-batches. Used by `outrider.integrations.huggingface`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset

from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MicroBatchCollate:
    """Collates the samples of a step in micro-batches, each as the Trainer would."""

    collate: Callable[[list[Any]], Any]
    size: int | None
    """Samples of a micro-batch; None: all."""

    def __call__(self, samples: list[Any]) -> list[dict[str, Any]]:
        size = self.size or len(samples)
        chunks = [samples[start : start + size] for start in range(0, len(samples), size)]
        return [{"inputs": self.collate(chunk), "count": len(chunk)} for chunk in chunks]


class KeptOrder:
    """The first positions of a sampler's sequence: `drop_last` of the Trainer leaves out the end."""

    def __init__(self, sampler: Any, count: int) -> None:
        self.sampler = sampler
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return islice(iter(self.sampler), self._count)


class StepLoader(Sized):
    """A Trainer's training data, as a session takes it; `len()` counts as the Trainer does, in micro-batches."""

    def __init__(self, loader: DataLoader[Any], *, accumulation: int, num_parts: int, pins_memory: bool) -> None:
        """`num_parts` is how many batches of the loader a step of all ranks has: their number with policy `sync`."""
        _refuse(loader, accumulation=accumulation)
        self.dataset: Dataset[Any] = loader.dataset
        self._batches: Any = loader.batch_sampler
        self._has_plain_batches = type(self._batches) is BatchSampler
        batches: Any = self._batches
        self._part: int = batches.batch_size * num_parts if self._has_plain_batches else num_parts
        self.step_samples = self._part * accumulation
        """Samples of an optimizer step of all ranks."""
        self.num_samples = self._count(loader)
        self.loader = self._made(loader, accumulation=accumulation, pins_memory=pins_memory)

    def __len__(self) -> int:
        return -(-self.num_samples // self._part)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an epoch."""
        return -(-self.num_samples // self.step_samples)

    def part_of_epoch(self, steps: int) -> float:
        """How much of an epoch so many of its steps are, as the Trainer tells it."""
        return min(1.0, steps * self.step_samples / self._part / len(self))

    def _count(self, loader: DataLoader[Any]) -> int:
        if not self._has_plain_batches:
            return len(self._batches)
        count = len(self._batches.sampler)
        return count - count % self._part if self._batches.drop_last else count

    def _made(self, loader: DataLoader[Any], *, accumulation: int, pins_memory: bool) -> DataLoader[Any]:
        settings: dict[str, Any] = {
            "num_workers": loader.num_workers,
            "worker_init_fn": loader.worker_init_fn,
            "prefetch_factor": loader.prefetch_factor if loader.num_workers else None,
            "multiprocessing_context": loader.multiprocessing_context,
            "persistent_workers": loader.persistent_workers,
            "timeout": loader.timeout,
            "pin_memory": loader.pin_memory and pins_memory,
            "in_order": getattr(loader, "in_order", True),
        }
        collate = loader.collate_fn
        if not self._has_plain_batches:
            return DataLoader(
                self.dataset, batch_sampler=self._batches, collate_fn=MicroBatchCollate(collate, None), **settings
            )
        size = self._batches.batch_size
        return DataLoader(
            self.dataset,
            batch_size=size * accumulation,
            sampler=KeptOrder(self._batches.sampler, self.num_samples),
            collate_fn=MicroBatchCollate(collate, size),
            **settings,
        )


def _refuse(loader: DataLoader[Any], *, accumulation: int) -> None:
    if loader.batch_sampler is None or not hasattr(loader.dataset, "__len__"):
        raise ConfigError(
            f"the Trainer's train_dataset is a stream without a length ({type(loader.dataset).__name__})",
            hint="use a map-style data set, or an own loop: s.batches(stream, length=n) takes streams",
        )
    if type(loader.batch_sampler) is not BatchSampler and accumulation > 1:
        raise ConfigError(
            f"gradient_accumulation_steps={accumulation} with a batch sampler of its own "
            f"({type(loader.batch_sampler).__name__}): its batches are handed out whole, one per step",
            hint="leave gradient_accumulation_steps out and let the batch sampler make larger batches",
        )
