"""The settings of data workers: the settings of a DataLoader, except those for data, order and batches.

Decides nothing; it passes the user's settings to the feed that starts the workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """Settings of a DataLoader's worker processes; most names are torch's."""

    worker_init_fn: Callable[[int], None] | None = None
    prefetch_factor: int | None = None
    multiprocessing_context: Any = None
    timeout_s: float | None = None
    """Timeout for a batch; None for the feed's default."""
    seed: int | None = None
    """The seed of the workers' random generators, as `worker_init_fn` sees it."""
    pins_memory: bool = False
    """Whether batches that are read in the rank are copied to a GPU from pinned memory; workers always do that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedData:
    """A data set with the settings of the DataLoader from which it was taken."""

    dataset: Any
    loading: Loading


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedEvaluation:
    """The data of an evaluation with the settings of its own DataLoader, which may differ from those for training."""

    loaded: LoadedData
    batch_size: int
    workers: int
    collate: Callable[[list[Any]], Any] | None
