"""Which data sets are tables of tensors."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from outrider.data.tensor_table import as_table
from outrider.errors import DataError


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(2 * tensor[index] for tensor in self.tensors)


class Named(NamedTuple):
    image: Tensor
    label: Tensor


def test_a_tensor_dataset_is_a_table() -> None:
    table = as_table(TensorDataset(torch.arange(6).view(3, 2), torch.arange(3)))
    assert table is not None
    assert len(table) == 3


def test_a_subset_of_a_subset_keeps_the_right_rows() -> None:
    table = as_table(Subset(Subset(TensorDataset(torch.arange(10)), [9, 7, 5, 3]), [3, 1]))
    assert table is not None
    assert [table[0], table[1]] == [(torch.tensor(3),), (torch.tensor(7),)]


def test_a_subset_with_a_wrong_index_is_left_to_be_read_sample_by_sample() -> None:
    assert as_table(Subset(TensorDataset(torch.arange(3)), [0, 3])) is None


def test_a_tensor_dataset_that_changes_its_samples_is_no_table() -> None:
    assert as_table(Doubled(torch.arange(3))) is None


def test_a_named_tuple_of_tensors_gives_named_samples() -> None:
    table = as_table(Named(image=torch.zeros(4, 2), label=torch.arange(4)))
    assert table is not None
    assert table[2].label == 2


def test_a_list_of_unlike_tensors_is_columns() -> None:
    table = as_table([torch.zeros(4, 2), torch.arange(4)])
    assert table is not None
    assert len(table) == 4


def test_a_list_of_like_tensors_is_samples_as_for_a_data_loader() -> None:
    assert as_table([torch.zeros(3, 8, 8), torch.zeros(3, 8, 8)]) is None


def test_a_list_of_pairs_is_no_table() -> None:
    assert as_table([(torch.zeros(2), 0), (torch.zeros(2), 1)]) is None


def test_memory_counts_only_the_rows_of_a_subset() -> None:
    table = as_table(Subset(TensorDataset(torch.zeros(100, 5), torch.arange(100)), range(10)))
    assert table is not None
    assert table.num_bytes == 10 * (5 * 4 + 8)


def test_columns_of_unequal_length_are_refused_with_their_lengths() -> None:
    with pytest.raises(DataError) as caught:
        as_table({"image": torch.zeros(4, 2), "label": torch.zeros(3)})
    assert str(caught.value) == (
        "the tensors of a data set must have the same first dimension, got image: 4, label: 3\n"
        "hint: the first dimension counts the samples; check for a transposed or truncated tensor"
    )
