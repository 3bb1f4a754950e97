"""Reading samples from a map-style data set and collating them into a batch.

Decides the randomness of each sample: keyed by (seed, epoch, index), so it looks the same whoever takes it.
Knows nothing of devices or processes. ItemFeed calls it in the rank, WorkerFeed in its workers.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from outrider.data import randomness
from outrider.data.order import mix, sample_seed
from outrider.errors import DataError, named

Collate = Callable[[list[Any]], Any]

_MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The samples of one batch."""

    epoch: int
    indices: tuple[int, ...]


class Drawer:
    """Draws batches; leaves the random generators as it found them."""

    def __init__(self, dataset: Any, *, seed: int, collate: Collate | None = None) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate or default_collate
        self._reads_many = callable(getattr(dataset, "__getitems__", None))

    def draw(self, request: Request) -> Any:
        with randomness.preserved():
            samples = self._read_many(request) if self._reads_many else self._read_each(request)
            return self._collated(samples, request)

    def _read_many(self, request: Request) -> list[Any]:
        randomness.seed_all(mix(self._seed, request.epoch, *request.indices))
        before = randomness.capture()
        try:
            samples = list(self._dataset.__getitems__(list(request.indices)))
        except Exception as error:
            raise _unreadable(request.indices, error) from error
        if randomness.capture().equals(before):
            return samples
        # Random numbers drawn for the batch as a whole would make a sample depend on its neighbours.
        self._reads_many = False
        return self._read_each(request)

    def _read_each(self, request: Request) -> list[Any]:
        return [self._read(request.epoch, index) for index in request.indices]

    def _read(self, epoch: int, index: int) -> Any:
        randomness.seed_all(sample_seed(self._seed, epoch, index))
        try:
            return self._dataset[index]
        except Exception as error:
            raise _unreadable([index], error) from error

    def _collated(self, samples: list[Any], request: Request) -> Any:
        randomness.seed_all(mix(self._seed, request.epoch, *request.indices))
        try:
            return self._collate(samples)
        except Exception as error:
            raise DataError(
                f"{name_samples(request.indices)} could not be collated: {named(error)}",
                hint="samples of a batch need equal shapes and types; pass collate= to pad or pack them",
                traceback=traceback.format_exc(),
            ) from error


def name_samples(indices: Sequence[int]) -> str:
    """`sample 3`, or `samples 3, 4, 5`, cut short where there are many."""
    if len(indices) == 1:
        return f"sample {indices[0]}"
    named = ", ".join(str(index) for index in indices[:_MOST_NAMED])
    return f"samples {named}" if len(indices) <= _MOST_NAMED else f"samples {named}, … ({len(indices)} in all)"


def _unreadable(indices: Sequence[int], error: Exception) -> DataError:
    return DataError(
        f"{name_samples(indices)} could not be read: {named(error)}",
        hint=f"try dataset[{indices[0]}] by itself",
        traceback=traceback.format_exc(),
    )
