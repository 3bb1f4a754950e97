"""The products of a step are recorded as the device computes them: forward and backward, with their layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.replica.half_products import HalfProduct, Operand, ProductRecorder

ROWS, INNER, COLUMNS = 6, 8, 5


def shapes(products: tuple[HalfProduct, ...]) -> list[tuple[Any, ...]]:
    return [(one.operation, *(operand.shape for operand in one.operands)) for one in products]


def recorded_pass(model: nn.Module, x: Tensor) -> tuple[HalfProduct, ...]:
    with ProductRecorder() as recorder:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().sum()
        loss.backward()
    return recorder.products


def test_a_layer_has_three_products() -> None:
    x = torch.randn(ROWS, INNER, requires_grad=True)
    assert shapes(recorded_pass(nn.Linear(INNER, COLUMNS), x)) == [
        ("addmm", (COLUMNS,), (ROWS, INNER), (INNER, COLUMNS)),
        ("mm", (ROWS, COLUMNS), (COLUMNS, INNER)),
        ("mm", (COLUMNS, ROWS), (ROWS, INNER)),
    ]


def test_products_of_attention_are_seen() -> None:
    query, key = torch.randn(3, 2, ROWS, 4), torch.randn(3, 2, ROWS, 4)
    with ProductRecorder() as recorder, torch.autocast("cpu", torch.bfloat16):
        query @ key.transpose(-1, -2)
    (found,) = recorder.products
    assert (found.operation, found.shape) == ("bmm", (6, ROWS, ROWS))
    assert str(found) == "bmm of 6 × 6 × 4 and 6 × 4 × 6 in bfloat16"


def test_the_same_product_is_recorded_once_and_single_precision_never() -> None:
    model = nn.Sequential(nn.Linear(INNER, INNER, bias=False), nn.Linear(INNER, INNER, bias=False)).requires_grad_(
        False
    )
    with ProductRecorder() as recorder:
        model(torch.randn(ROWS, INNER))
    assert recorder.products == ()
    left, right = torch.ones(2, 3, dtype=torch.float16), torch.ones(3, 2, dtype=torch.float16)
    with ProductRecorder() as recorder:
        left @ right
        left @ right
    assert len(recorder.products) == 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(6, 8),
        torch.randn(8, 6).t(),
        torch.randn(8, 8)[:, 3:7],
        torch.randn(1, 5).expand(4, 5),
        torch.randn(65)[1:].view(8, 8),
    ],
)
def test_a_layout_is_made_again(tensor: Tensor) -> None:
    made = Operand.of(tensor).random(torch.float32, torch.Generator().manual_seed(0))
    assert (made.shape, made.stride()) == (tensor.shape, tensor.stride())
    assert Operand.of(made).skipped == Operand.of(tensor).skipped
    assert made.isfinite().all()
