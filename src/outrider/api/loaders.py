"""Reads what the user gives as data: a data set with a batch size, or a DataLoader that has both.

Decides which of a DataLoader's settings carry over. Used by the session.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from outrider.errors import ConfigError
from outrider.replica.recipe import check_at_least
from outrider.runtime.feeds import Source


def as_source(
    dataset: Any,
    *,
    batch_size: int | None,
    shuffle: bool | None = None,
    workers: int | None = None,
    collate: Any = None,
    **others: Any,
) -> Source:
    """The data set and how its batches are made; what is given stands above what a DataLoader says."""
    found: dict[str, Any] = {"shuffle": True, "workers": 0}
    if isinstance(dataset, DataLoader):
        found = _settings(dataset)
        dataset = dataset.dataset
    given = {"batch_size": batch_size, "shuffle": shuffle, "workers": workers, "collate": collate}
    settings = found | {name: value for name, value in given.items() if value is not None}
    if "batch_size" not in settings:
        raise ConfigError("batch_size is missing", hint="call s.batches(dataset, batch_size=64)")
    check_at_least("batch_size", settings["batch_size"], 1)
    return Source(dataset=dataset, **settings, **others)


def _settings(loader: DataLoader[Any]) -> dict[str, Any]:
    decider = _decider(loader)
    if decider is not None:
        raise ConfigError(
            f"a DataLoader with {decider} decides itself which samples come when",
            hint="pass the data set and batch_size=; every sample then goes to one of the ranks",
        )
    settings: dict[str, Any] = {
        "batch_size": loader.batch_size,
        "shuffle": isinstance(loader.sampler, RandomSampler),
        "workers": loader.num_workers,
    }
    if loader.collate_fn is not default_collate:
        settings["collate"] = loader.collate_fn
    return settings


def _decider(loader: DataLoader[Any]) -> str | None:
    """What gives a DataLoader an order of its own; None where every sample comes once, in order or shuffled."""
    sampler = loader.sampler
    if loader.batch_size is None:
        return "batch_size=None" if loader.batch_sampler is None else type(loader.batch_sampler).__name__
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(loader.dataset)):  # type: ignore[arg-type]
        return "a RandomSampler of its own"
    return None if isinstance(sampler, RandomSampler | SequentialSampler) else type(sampler).__name__
