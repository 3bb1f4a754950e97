"""A rank's access to batches by position, and the choice of the feed.

Decides which feed serves a data set: tensors, reading in the rank, or reading by workers. Refuses data sets that no
feed can serve. Does not decide which positions a rank takes. Called by the rank driver and the lab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from outrider.data.augmented_feed import AugmentedFeed, AugmentFunction
from outrider.data.loading import LoadedData, LoadedEvaluation, Loading
from outrider.data.packed_batch import Feed
from outrider.data.sample_reader import Collate, ItemFeed, to_device
from outrider.data.stream_feed import StreamFeed, is_stream, refuse_iterators
from outrider.data.tensor_table import TensorFeed, TensorTable, as_table, host_feed, resident_feed
from outrider.data.worker_feed import WorkerFeed
from outrider.errors import ConfigError, DataError

__all__ = [
    "Feed",
    "ItemFeed",
    "TensorFeed",
    "WorkerFeed",
    "make_evaluation_feed",
    "make_feed",
    "open_dataset",
    "to_device",
]

Resident = bool | Literal["auto"]


def make_feed(
    dataset: Any,
    *,
    device: torch.device | str,
    seed: int,
    workers: int = 0,
    collate: Collate | None = None,
    resident: Resident = "auto",
    augment: AugmentFunction | None = None,
    loading: Loading | None = None,
    length: int | None = None,
) -> Feed:
    """Create the best feed for this data set; its `reason` explains the choice. A stream needs its `length`."""
    target = torch.device(device)
    if isinstance(dataset, LoadedData):
        dataset, loading = dataset.dataset, dataset.loading
    _check_options(workers=workers, collate=collate, resident=resident)
    feed: Feed
    if length is not None and resident is not True:
        feed = StreamFeed(_open_stream(dataset), length=length, device=target, seed=seed, collate=collate)
    else:
        feed = _plain_feed(
            dataset,
            device=target,
            seed=seed,
            workers=workers,
            collate=collate,
            resident=resident,
            loading=loading or Loading(),
        )
    return feed if augment is None else AugmentedFeed(feed, augment, device=target, seed=seed)


def make_evaluation_feed(
    dataset: Any,
    *,
    device: torch.device | str,
    seed: int,
    workers: int = 0,
    collate: Collate | None = None,
    resident: Resident = "auto",
) -> Feed:
    """Create the feed of an evaluation; settings of its own DataLoader replace those of training."""
    if isinstance(dataset, LoadedEvaluation):
        dataset, workers, collate = dataset.loaded, dataset.workers, dataset.collate
        resident = resident if collate is None else "auto"
    return make_feed(dataset, device=device, seed=seed, workers=workers, collate=collate, resident=resident)


def _plain_feed(
    dataset: Any,
    *,
    device: torch.device,
    seed: int,
    workers: int,
    collate: Collate | None,
    resident: Resident,
    loading: Loading,
) -> Feed:
    opened = open_dataset(dataset)
    table = as_table(opened)
    if table is not None and collate is None:
        return _tensor_feed(table, device=device, resident=resident)
    if resident is True:
        raise ConfigError(
            f"resident=True needs a data set made of tensors, got {_name(opened)}",
            hint="make it a torch.utils.data.TensorDataset, or leave resident out",
        )
    source = opened if table is None else table
    if workers == 0:
        reason = f"{_name(opened)} is read in the rank (workers=0)"
        pins = loading.pins_memory and device.type == "cuda"
        return ItemFeed(source, device=device, seed=seed, collate=collate, reason=reason, pins_memory=pins)
    reason = f"{_name(opened)} is read ahead by workers ({workers})"
    return WorkerFeed(
        source, device=device, workers=workers, seed=seed, collate=collate, reason=reason, loading=loading
    )


def _open_stream(dataset: Any) -> Any:
    """Return the stream; call the factory first if one was given."""
    opened = dataset() if is_factory(dataset) else dataset
    if not is_stream(opened):
        raise ConfigError(f"length was given, but {_name(opened)} is not an iterable data set", hint="leave length out")
    refuse_iterators(opened)
    return opened


def open_dataset(dataset: Any) -> Any:
    """Return the data set; call the factory first if one was given. Raises if its samples have no positions."""
    opened = dataset() if is_factory(dataset) else dataset
    if isinstance(opened, DataLoader):
        raise DataError(
            "a DataLoader was given as the data set: the samples are handed out here, not by it",
            hint="pass its data set, and batch_size, shuffle, workers, collate and drop_last beside it",
        )
    if is_stream(opened):
        raise DataError(
            f"{_name(opened)} is an iterable-style data set: its samples have no positions to hand out",
            hint="pass length=, the number of its samples in an epoch, or use a map-style data set with __getitem__ "
            "and __len__",
        )
    if not hasattr(opened, "__getitem__"):
        raise DataError(
            f"{_name(opened)} is not a data set: it has no __getitem__",
            hint="pass a map-style torch data set, tensors, or a function of no arguments that returns one",
        )
    if _length(opened) == 0:
        raise DataError("the data set is empty", hint="it needs at least one sample; check its path, split or filter")
    return opened


def _length(dataset: Any) -> int:
    table = as_table(dataset)
    try:
        return len(dataset if table is None else table)
    except (TypeError, IndexError, NotImplementedError) as error:
        raise DataError(
            f"{_name(dataset)} has no length",
            hint="define __len__, so that every sample can be handed out exactly once per epoch",
        ) from error


def is_factory(dataset: Any) -> bool:
    return isinstance(dataset, type) or (callable(dataset) and not hasattr(dataset, "__getitem__"))


def _check_options(*, workers: int, collate: Collate | None, resident: Resident) -> None:
    if workers < 0:
        raise ConfigError(f"workers must be >= 0, got {workers}", hint="0 reads the data in the rank itself")
    if not isinstance(resident, bool) and resident != "auto":
        raise ConfigError(
            f"resident must be True, False or 'auto', got {resident!r}",
            hint="'auto' keeps tensors on the device where they fit",
        )
    if resident is True and collate is not None:
        raise ConfigError(
            "resident=True cannot go with collate: tensors on the device are taken by index, not sample by sample",
            hint="leave one of the two out",
        )


# Placement of the tensors of a table: on the device or in host memory.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placement:
    is_resident: bool
    reason: str


def _tensor_feed(table: TensorTable, *, device: torch.device, resident: Resident) -> TensorFeed:
    placement = _place(table.num_bytes, device=device, resident=resident)
    make = resident_feed if placement.is_resident else host_feed
    return make(table, device=device, reason=placement.reason)


def _place(needed_bytes: int, *, device: torch.device, resident: Resident) -> _Placement:
    size = _in_words(needed_bytes)
    if device.type == "cpu":
        return _Placement(is_resident=False, reason=f"tensors of {size} in host memory, taken by index")
    if resident is False:
        return _Placement(is_resident=False, reason=f"tensors of {size} stay in host memory (resident=False)")
    free_bytes = free_device_bytes(device)
    if resident is True and free_bytes is not None and needed_bytes > free_bytes:
        raise ConfigError(
            f"resident=True needs {size} on {device}, {_in_words(free_bytes)} is free",
            hint="leave resident out to keep the data in host memory",
        )
    if resident is True:
        return _Placement(is_resident=True, reason=f"tensors of {size} kept on {device} (resident=True)")
    return _place_where_it_fits(needed_bytes, free_bytes=free_bytes, device=device)


def _place_where_it_fits(needed_bytes: int, *, free_bytes: int | None, device: torch.device) -> _Placement:
    size = _in_words(needed_bytes)
    if free_bytes is None:
        return _Placement(
            is_resident=False, reason=f"tensors of {size} stay in host memory: free memory of {device} is not known"
        )
    # Leave half for the model, its gradients and activations, which are not allocated yet.
    verdict = f"half of the {_in_words(free_bytes)} free on {device}"
    if needed_bytes * 2 > free_bytes:
        return _Placement(is_resident=False, reason=f"tensors of {size} stay in host memory: more than {verdict}")
    return _Placement(is_resident=True, reason=f"tensors of {size} kept on {device}: at most {verdict}")


def free_device_bytes(device: torch.device) -> int | None:
    """Free memory of an accelerator, or None if it is not known."""
    if device.type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes)


def _in_words(num_bytes: int) -> str:
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes} bytes"


def _name(dataset: Any) -> str:
    return type(dataset).__name__
