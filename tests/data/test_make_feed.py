"""Data sets and options that cannot work, word for word, and factories."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from outrider.data.feed import make_feed, open_dataset
from outrider.errors import ConfigError, DataError, OutriderError


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index * index


def _words(kind: type[OutriderError], dataset: Any, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        make_feed(dataset, device="cpu", seed=0, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "dataset",
    [[], torch.zeros(0, 3), TensorDataset(torch.zeros(0)), Subset(Squares(), []), {"x": torch.zeros(0)}],
    ids=["list", "tensor", "tensor dataset", "subset", "dict"],
)
def test_an_empty_data_set_is_refused(dataset: Any) -> None:
    assert _words(DataError, dataset) == (
        "the data set is empty\nhint: it needs at least one sample; check its path, split or filter"
    )


def test_an_iterable_style_data_set_is_refused() -> None:
    assert _words(DataError, Stream()) == (
        "Stream is an iterable-style data set: its samples have no positions to hand out\n"
        "hint: pass length=, the number of its samples in an epoch, or use a map-style data set with __getitem__ and "
        "__len__"
    )


def test_a_generator_is_refused_as_iterable_style() -> None:
    assert _words(DataError, (index for index in range(3))).startswith("generator is an iterable-style data set")


def test_a_data_set_without_length_is_refused() -> None:
    assert _words(DataError, Endless()) == (
        "Endless has no length\nhint: define __len__, so that every sample can be handed out exactly once per epoch"
    )


def test_what_is_no_data_set_is_refused() -> None:
    assert _words(DataError, 3) == (
        "int is not a data set: it has no __getitem__\n"
        "hint: pass a map-style torch data set, tensors, or a function of no arguments that returns one"
    )


def test_resident_needs_tensors() -> None:
    assert _words(ConfigError, Squares(), resident=True) == (
        "resident=True needs a data set made of tensors, got Squares\n"
        "hint: make it a torch.utils.data.TensorDataset, or leave resident out"
    )


def test_resident_and_collate_exclude_each_other() -> None:
    assert _words(ConfigError, torch.zeros(3), resident=True, collate=list) == (
        "resident=True cannot go with collate: tensors on the device are taken by index, not sample by sample\n"
        "hint: leave one of the two out"
    )


def test_resident_is_true_false_or_auto() -> None:
    assert _words(ConfigError, torch.zeros(3), resident="yes") == (
        "resident must be True, False or 'auto', got 'yes'\nhint: 'auto' keeps tensors on the device where they fit"
    )


def test_workers_are_not_negative() -> None:
    assert _words(ConfigError, torch.zeros(3), workers=-1) == (
        "workers must be >= 0, got -1\nhint: 0 reads the data in the rank itself"
    )


def test_a_function_of_no_arguments_makes_the_data_set() -> None:
    assert make_feed(lambda: torch.zeros(5), device="cpu", seed=0).num_samples == 5


def test_a_class_makes_the_data_set() -> None:
    assert make_feed(Squares, device="cpu", seed=0).num_samples == 3


def test_a_function_that_makes_an_empty_data_set_is_refused_too() -> None:
    assert _words(DataError, lambda: []).startswith("the data set is empty")


def test_a_data_set_that_can_be_used_is_opened_as_it_is() -> None:
    dataset = Squares()
    assert open_dataset(dataset) is dataset
