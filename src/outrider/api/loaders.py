"""Reads the data that the user passes: a data set with a batch size, or a DataLoader that has both.

Decides what happens to each argument of a DataLoader: it is used, or refused with a hint.
Used by the session and by `train()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from outrider.data.loading import Loading
from outrider.data.sample_sequence import SampleSequence
from outrider.data.stream_feed import is_stream, refuse_for_stream, stream_length
from outrider.errors import ConfigError
from outrider.rank.session_feeds import Source
from outrider.replica.recipe import check_at_least, check_flag

ARGUMENTS = {
    "dataset": "taken over; an iterable one needs length=, unless it has a length",
    "batch_size": "taken over; None is refused, since batches that the data set makes cannot be handed out",
    "shuffle": "taken over: a new order in each epoch",
    "sampler": "taken over: each position of its sequence goes to one rank; a DistributedSampler is refused",
    "batch_sampler": "taken over: its batches are handed out whole, each to one rank",
    "num_workers": "taken over: workers of each rank",
    "collate_fn": "taken over",
    "pin_memory": "taken over; batches come on the rank's device in any case",
    "drop_last": "taken over: the end of the epoch's order that fills no batch is left out, the same on all ranks",
    "timeout": "taken over where it is not 0, which stands for the default limit of 600 s",
    "worker_init_fn": "taken over; called once in each worker, since workers live until the session ends",
    "multiprocessing_context": "taken over",
    "generator": "taken over: its initial seed decides the order",
    "prefetch_factor": "taken over",
    "persistent_workers": "taken over: workers live until the session ends in any case",
    "pin_memory_device": "refused: batches come on the rank's device",
    "in_order": "refused where it is False: the policy decides the order of batches",
}
"""Every argument of torch's DataLoader, and what happens to it."""


def as_source(
    dataset: Any,
    *,
    batch_size: int | None,
    shuffle: bool | None = None,
    workers: int | None = None,
    collate: Any = None,
    drop_last: bool | None = None,
    order: Any = None,
    length: int | None = None,
    **others: Any,
) -> Source:
    """Return the data set and its batching; explicit arguments override those of a DataLoader."""
    found: dict[str, Any] = {"shuffle": True, "workers": 0}
    if isinstance(dataset, DataLoader):
        found = loader_settings(dataset)
        dataset = dataset.dataset
    found |= _numbering(dataset, length=length, shuffle=shuffle, order=order, workers=workers or found["workers"])
    given = {
        "batch_size": batch_size,
        "shuffle": shuffle,
        "workers": workers,
        "collate": collate,
        "drop_last": drop_last,
    }
    if found.get("sequence") is not None:
        refuse_to_override(found["sequence"], given, always="shuffle")
    settings = found | {name: value for name, value in given.items() if value is not None}
    if "batch_size" not in settings:
        raise ConfigError("batch_size is missing", hint="call s.batches(dataset, batch_size=64)")
    if isinstance(settings["batch_size"], list | tuple | dict):
        raise ConfigError(
            "batch_size has one value per rank, which only train() takes",
            hint="pass one batch_size; with balanced, shares= gives ranks unequal parts of a batch",
        )
    check_at_least("batch_size", settings["batch_size"], 1)
    check_flag("drop_last", settings.get("drop_last", False))
    return Source(dataset=dataset, **settings, **others)


def _numbering(
    dataset: Any, *, length: int | None, shuffle: bool | None, order: Any, workers: int | None
) -> dict[str, Any]:
    """Decide how samples get positions: from the user's own order, or from the item numbers of a stream."""
    if is_stream(dataset):
        refuse_for_stream(dataset, shuffle=shuffle, order=order, workers=workers)
        if length is not None:
            check_at_least("length", length, 1)
        return {"shuffle": False, "length": stream_length(dataset, length)}
    if length is not None:
        raise ConfigError(
            f"length was given, but {type(dataset).__name__} is not an iterable data set", hint="leave length out"
        )
    return {} if order is None else {"sequence": _as_sequence(order)}


def _as_sequence(order: Any) -> SampleSequence:
    if not callable(order) and not hasattr(order, "__iter__"):
        raise ConfigError(
            f"order must be a function of the epoch or a sampler, got {type(order).__name__}",
            hint="pass order=lambda epoch: indices",
        )
    return SampleSequence(source=order)


def refuse_to_override(sequence: SampleSequence, given: Mapping[str, Any], *, always: str) -> None:
    """Raise where an argument and the user's own sequence of samples contradict each other."""
    names = (always, "batch_size", "drop_last") if sequence.has_batches else (always,)
    for name in names:
        # shuffle=False does not contradict the user's own order.
        if given.get(name) is not None and given[name] is not False:
            raise ConfigError(f"{name} was given, but {sequence.name} decides that already", hint=f"leave {name} out")


def loader_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """The settings of a DataLoader under the field names of `Source`; raises for settings that cannot be honoured."""
    _refuse(loader)
    seed = _order_seed(loader)
    settings: dict[str, Any] = {
        **_batching(loader),
        "workers": loader.num_workers,
        "order_seed": seed,
        "loading": Loading(
            worker_init_fn=loader.worker_init_fn,
            prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
            multiprocessing_context=loader.multiprocessing_context,
            timeout_s=loader.timeout or None,
            seed=seed,
            pins_memory=loader.pin_memory,
        ),
    }
    if loader.collate_fn is not default_collate:
        settings["collate"] = loader.collate_fn
    return settings


def _batching(loader: DataLoader[Any]) -> dict[str, Any]:
    """Read order and batches: torch's own order, the sequence of a sampler, or the batches of a batch sampler."""
    batches: Any = loader.batch_sampler
    if type(batches) is not BatchSampler:
        # A position is a whole batch.
        return {"batch_size": 1, "shuffle": False, "sequence": SampleSequence(source=batches, has_batches=True)}
    settings = {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    if is_stream(loader.dataset):
        return settings | {"shuffle": False}
    if _is_plain(batches.sampler, loader):
        return settings | {"shuffle": isinstance(batches.sampler, RandomSampler)}
    return settings | {"shuffle": False, "sequence": SampleSequence(source=batches.sampler)}


def _order_seed(loader: DataLoader[Any]) -> int | None:
    """The seed of the loader's generator; None if the session's seed decides the order."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    generator = getattr(sampler, "generator", None) or loader.generator
    return None if generator is None else generator.initial_seed()


def _refuse(loader: DataLoader[Any]) -> None:
    """Raise an error for every setting that cannot be honoured; none is ignored."""
    decider = _decider(loader)
    if decider is not None:
        raise ConfigError(f"a DataLoader with {decider} decides itself which samples come when", hint=_way_out(loader))
    if loader.pin_memory_device:
        raise ConfigError(
            f"a DataLoader with pin_memory_device={loader.pin_memory_device!r}: batches come on the rank's own device",
            hint="leave pin_memory_device out",
        )
    if not getattr(loader, "in_order", True):
        raise ConfigError(
            "a DataLoader with in_order=False: the policy decides the order of batches, and they come in it",
            hint="leave in_order out",
        )


def _way_out(loader: DataLoader[Any]) -> str:
    if _distributed(loader):
        return "leave the sampler out: outrider hands out the samples, each to one of the ranks"
    return "pass the data set and batch_size=; every sample then goes to one of the ranks"


def _decider(loader: DataLoader[Any]) -> str | None:
    """Name the part of a DataLoader that assigns samples to ranks or batches in a way we cannot reproduce."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"an __iter__ of its own ({type(loader).__name__})"
    if loader.batch_sampler is None:
        return "batch_size=None"
    return "DistributedSampler" if _distributed(loader) else None


def _distributed(loader: DataLoader[Any]) -> bool:
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def _is_plain(sampler: Any, loader: DataLoader[Any]) -> bool:
    """Whether the sampler yields the data set's own order or a permutation of it."""
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(loader.dataset)):  # type: ignore[arg-type]
        return False
    return type(sampler).__iter__ in (RandomSampler.__iter__, SequentialSampler.__iter__)
