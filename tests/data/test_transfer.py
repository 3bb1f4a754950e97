"""Moving nested batches; the meta device stands in for an accelerator."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from outrider.data.feed import to_device


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def test_tensors_in_nested_containers_move() -> None:
    moved = to_device({"x": (torch.ones(2), [torch.ones(3)])}, "meta")
    assert moved["x"][0].is_meta
    assert moved["x"][1][0].is_meta


def test_containers_keep_their_types() -> None:
    moved = to_device([(torch.ones(2),), OrderedDict(a=torch.ones(2))], "meta")
    assert [type(item) for item in moved] == [tuple, OrderedDict]


def test_named_tuples_stay_named() -> None:
    moved = to_device(Pair(torch.ones(2), torch.ones(3)), torch.device("meta"))
    assert moved.right.shape == (3,)
    assert moved.left.is_meta


def test_packed_sequences_move_themselves() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    assert isinstance(to_device(packed, "cpu"), PackedSequence)


def test_what_is_no_tensor_stays_as_it_is() -> None:
    assert to_device({"name": "a.png", "size": 3, "none": None}, "meta") == {"name": "a.png", "size": 3, "none": None}


def test_the_batch_handed_in_is_not_changed() -> None:
    batch = {"x": torch.ones(2)}
    to_device(batch, "meta")
    assert not batch["x"].is_meta
