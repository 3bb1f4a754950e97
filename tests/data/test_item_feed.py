"""Samples read in the rank: what comes, what it draws from, and how it fails."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from outrider.data import randomness
from outrider.data.feed import Feed, make_feed
from outrider.data.order import in_order
from outrider.errors import DataError
from outrider.policy.effects import Batch


class Noisy(Dataset[Tensor]):
    """Each sample: its index and a number from each generator."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), np.random.random(), torch.rand(()).item()], dtype=torch.float64)


class NoisyInBulk(Noisy):
    """Draws for the batch as a whole."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


class Bulk(Dataset[int]):
    """Can only be read many at a time."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        raise AssertionError("read one by one")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [10 * index for index in indices]


class Broken(Dataset[Any]):
    """Sample 3 cannot be read, sample 5 has another shape."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        if index == 3:
            raise ValueError("bad pixel")
        return torch.zeros(9 if index == 5 else 8)


def _started(dataset: Any, *, epoch: int = 0, **options: Any) -> Feed:
    feed = make_feed(dataset, device="cpu", seed=7, **options)
    feed.start_epoch(in_order(feed.num_samples), epoch)
    return feed


def test_samples_are_collated_as_torch_does() -> None:
    images, labels = _started([(torch.ones(2), 4), (torch.zeros(2), 5)]).fetch(Batch(0, 2))
    assert images.tolist() == [[1, 1], [0, 0]]
    assert labels.tolist() == [4, 5]


def test_a_collate_function_gets_the_list_of_samples() -> None:
    assert _started(["a", "b", "c"], collate="-".join).fetch(Batch(1, 2)) == "b-c"


def test_a_collate_function_gets_the_rows_of_a_dict_of_tensors() -> None:
    feed = _started({"label": torch.arange(3)}, collate=lambda rows: [row["label"].item() for row in rows])
    assert feed.fetch(Batch(0, 3)) == [0, 1, 2]


def test_a_data_set_is_read_many_at_a_time_where_it_can() -> None:
    assert _started(Bulk()).fetch(Batch(2, 3)).tolist() == [20, 30, 40]


def test_a_sample_looks_the_same_whichever_batch_it_is_in() -> None:
    feed = _started(Noisy())
    assert torch.equal(feed.fetch(Batch(0, 6))[4], feed.fetch(Batch(4, 2))[0])


def test_a_sample_looks_the_same_in_another_order() -> None:
    feed = _started(Noisy())
    expected = feed.fetch(Batch(4, 1))
    feed.start_epoch(in_order(10).flip(0), 0)
    assert torch.equal(feed.fetch(Batch(5, 1)), expected)


def test_a_sample_looks_the_same_from_a_data_set_read_many_at_a_time() -> None:
    assert torch.equal(_started(NoisyInBulk()).fetch(Batch(0, 6)), _started(Noisy()).fetch(Batch(0, 6)))


def test_samples_of_a_subset_look_the_same_whichever_batch_they_are_in() -> None:
    feed = _started(Subset(Noisy(), [8, 2, 5]))
    assert torch.equal(feed.fetch(Batch(0, 3))[2], feed.fetch(Batch(2, 1))[0])


def test_a_sample_looks_different_in_another_epoch() -> None:
    first = _started(Noisy(), epoch=0).fetch(Batch(0, 1))[0, 1:]
    assert not (first == _started(Noisy(), epoch=1).fetch(Batch(0, 1))[0, 1:]).any()


def test_two_samples_draw_different_numbers() -> None:
    batch = _started(Noisy()).fetch(Batch(0, 2))
    assert not (batch[0, 1:] == batch[1, 1:]).any()


def test_the_generators_of_the_rank_are_left_alone() -> None:
    feed = _started(Noisy())
    before = randomness.capture()
    feed.fetch(Batch(0, 4))
    assert randomness.capture().equals(before)


def test_the_generators_of_the_rank_are_left_alone_when_a_sample_fails() -> None:
    feed = _started(Broken())
    before = randomness.capture()
    with pytest.raises(DataError):
        feed.fetch(Batch(3, 1))
    assert randomness.capture().equals(before)


def test_a_sample_that_cannot_be_read_is_named() -> None:
    with pytest.raises(DataError) as caught:
        _started(Broken()).fetch(Batch(2, 3))
    assert caught.value.message == "sample 3 could not be read: ValueError: bad pixel"
    assert caught.value.hint == "try dataset[3] by itself"
    assert 'raise ValueError("bad pixel")' in str(caught.value.traceback)


def test_samples_that_cannot_be_collated_are_named() -> None:
    with pytest.raises(DataError) as caught:
        _started(Broken()).fetch(Batch(4, 3))
    assert caught.value.message == (
        "samples 4, 5, 6 could not be collated: RuntimeError: stack expects each tensor to be equal size, "
        "but got [8] at entry 0 and [9] at entry 1"
    )
    assert caught.value.hint == "samples of a batch need equal shapes and types; pass collate= to pad or pack them"


def test_many_samples_that_cannot_be_collated_are_counted() -> None:
    def refuse(samples: list[Any]) -> Any:
        raise TypeError("no")

    with pytest.raises(DataError) as caught:
        _started(Broken(), collate=refuse).fetch(Batch(6, 10))
    assert caught.value.message == (
        "samples 6, 7, 8, 9, 10, 11, 12, 13, … (10 in all) could not be collated: TypeError: no"
    )
    assert caught.value.hint is None, "shapes may have nothing to do with it"


def test_the_reason_names_the_data_set() -> None:
    assert _started(Noisy()).reason == "Noisy is read in the rank (workers=0)"
