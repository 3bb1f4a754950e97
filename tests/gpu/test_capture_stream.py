"""Captures on a CUDA device by themselves: what memory they leave, and what a failed one undoes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn import functional

from outrider.replica.capture import CaptureStream, Uncapturable

CUDA = torch.device("cuda:0")


def test_products_in_a_graph_keep_no_scratch_memory_that_others_could_be_given() -> None:
    stream = CaptureStream(CUDA)
    left, right = (torch.randn(256, 256, device=CUDA).bfloat16() for _ in range(2))
    product = torch.empty(256, 256, device=CUDA, dtype=torch.bfloat16)
    # torch keeps scratch memory for the stream from here on; a graph that wrote to it would go on when it is freed.
    stream.run(lambda: torch.matmul(left, right, out=product))
    expected, held = product.clone(), torch.cuda.memory_allocated()
    kept, other = (stream.capture(lambda: torch.matmul(left, right, out=product)) for _ in range(2))
    assert torch.cuda.memory_allocated() < held
    del other
    gc.collect()
    product.zero_()
    kept.replay()
    assert torch.equal(product, expected)


def test_a_capture_that_fails_leaves_the_device_usable() -> None:
    stream = CaptureStream(CUDA)
    values = torch.ones(8, device=CUDA)
    for _ in range(2):
        with pytest.raises(Uncapturable):
            stream.capture(lambda: functional.dropout(values).sum().item())
    kept = torch.zeros((), device=CUDA)
    graph = stream.capture(lambda: kept.add_(functional.dropout(values).sum() * 0 + 1))
    functional.dropout(values)
    graph.replay()
    graph.replay()
    assert kept.item() == 2


def test_an_error_of_the_users_in_a_capture_leaves_the_device_usable() -> None:
    def fail() -> None:
        values.add_(1)
        raise ValueError("mine")

    stream = CaptureStream(CUDA)
    values = torch.zeros((), device=CUDA)
    with pytest.raises(Uncapturable, match=r"^ValueError: mine$"):
        stream.capture(fail)
    stream.capture(lambda: values.add_(1)).replay()
    assert values.item() == 1
