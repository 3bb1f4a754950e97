"""Cutting a batch: every sample once, in order, whatever the batch is made of."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ConfigError
from outrider.replica.gradient_accumulation import pieces
from outrider.replica.micro_batches import MicroBatches


class Pair(NamedTuple):
    inputs: torch.Tensor
    names: list[str]


@given(samples=st.integers(1, 40), parts=st.integers(1, 50))
def test_pieces_hold_every_sample_once_and_are_nearly_equal(samples: int, parts: int) -> None:
    cut = list(pieces(torch.arange(samples), MicroBatches(accumulate=parts, batch_size=parts).counts(samples)))
    assert torch.cat([piece for piece, _ in cut]).tolist() == list(range(samples))
    assert [len(piece) for piece, _ in cut] == [count for _, count in cut]
    assert max(count for _, count in cut) - min(count for _, count in cut) <= 1


def test_nested_batches_keep_their_form() -> None:
    batch = {"pair": Pair(torch.arange(3), ["a", "b", "c"]), "list": [torch.arange(3), torch.arange(3)]}
    (first, count), (second, _) = pieces(batch, (2, 1))
    assert count == 2
    assert isinstance(first["pair"], Pair)
    assert (first["pair"].inputs.tolist(), first["pair"].names) == ([0, 1], ["a", "b"])
    assert [tensor.tolist() for tensor in second["list"]] == [[2], [2]]


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (3, "it has a value of type int"),
        ((torch.zeros(3), torch.zeros(2, 3)), r"it has a tensor of shape \(2, 3\)"),
        ((torch.zeros(3), torch.tensor(1.0)), r"it has a tensor of shape \(\)"),
        ({"names": ["a", "b"]}, "it has a list of 2 items"),
    ],
)
def test_what_cannot_be_cut_is_named(batch: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^a batch of 3 samples cannot be cut into micro-batches: {reason}"):
        list(pieces(batch, (2, 1)))
