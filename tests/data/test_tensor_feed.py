"""Rows by index against what torch's own DataLoader gives; the meta device stands in for an accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset, TensorDataset

from outrider.data import feed as feed_module
from outrider.data.feed import TensorFeed, make_feed
from outrider.data.order import in_order, shuffled
from outrider.errors import ConfigError
from outrider.policy.effects import Batch, Lease

IMAGES = torch.arange(7 * 3, dtype=torch.float32).view(7, 3)
LABELS = torch.arange(7)


def _all(dataset: Any, batch_size: int, order: torch.Tensor) -> list[Any]:
    feed = make_feed(dataset, device="cpu", seed=0)
    feed.start_epoch(order, 0)
    return [feed.fetch(batch) for batch in Lease(0, feed.num_samples).batches(batch_size)]


def test_batches_are_those_of_a_data_loader() -> None:
    dataset = TensorDataset(IMAGES, LABELS)
    for (images, labels), (expected_images, expected_labels) in zip(
        _all(dataset, 4, in_order(7)), DataLoader(dataset, batch_size=4), strict=True
    ):
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels)


def test_a_data_set_of_one_tensor_gives_batches_of_one_item() -> None:
    (labels,) = _all(TensorDataset(LABELS), 7, in_order(7))[0]
    assert labels.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_bare_tensor_gives_bare_tensors() -> None:
    assert _all(LABELS, 4, in_order(7))[1].tolist() == [4, 5, 6]


def test_a_dict_of_tensors_gives_dicts() -> None:
    batch = _all({"image": IMAGES, "label": LABELS}, 4, in_order(7))[0]
    assert batch["label"].tolist() == [0, 1, 2, 3]
    assert batch["image"].shape == (4, 3)


def test_a_subset_gives_its_own_rows_in_the_order_asked_for() -> None:
    (labels,) = _all(Subset(TensorDataset(LABELS), [6, 4, 2]), 3, torch.tensor([2, 0, 1]))[0]
    assert labels.tolist() == [2, 6, 4]


@given(num_samples=st.integers(1, 60), batch_size=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_every_sample_is_fetched_exactly_once(num_samples: int, batch_size: int, seed: int) -> None:
    order = shuffled(num_samples, seed=seed, epoch=0)
    batches = _all(torch.arange(num_samples), batch_size, order)
    assert torch.cat(batches).tolist() == order.tolist()


def test_the_next_epoch_has_its_own_order() -> None:
    feed = make_feed(LABELS, device="cpu", seed=0)
    feed.start_epoch(in_order(7), 0)
    feed.start_epoch(in_order(7).flip(0), 1)
    assert feed.fetch(Batch(0, 2)).tolist() == [6, 5]


def test_batches_arrive_on_the_device_from_host_memory() -> None:
    feed = make_feed(TensorDataset(IMAGES, LABELS), device="meta", seed=0, resident=False)
    feed.start_epoch(in_order(7), 0)
    assert [tensor.is_meta for tensor in feed.fetch(Batch(0, 2))] == [True, True]


def test_batches_arrive_on_the_device_from_resident_tensors() -> None:
    feed = make_feed(Subset(TensorDataset(IMAGES), [1, 2]), device="meta", seed=0, resident=True)
    feed.start_epoch(in_order(2), 0)
    assert feed.fetch(Batch(0, 1))[0].shape == (1, 3)


def test_workers_are_not_needed_for_tensors() -> None:
    assert isinstance(make_feed(TensorDataset(LABELS), device="cpu", seed=0, workers=2), TensorFeed)


# Where the tensors are kept.


def test_on_the_cpu_tensors_are_taken_where_they_are() -> None:
    assert make_feed(LABELS, device="cpu", seed=0).reason == "tensors of 56 bytes in host memory, taken by index"


def test_tensors_stay_on_the_host_when_told_to() -> None:
    feed = make_feed(torch.zeros(1_000_000), device="cuda:0", seed=0, resident=False)
    assert feed.reason == "tensors of 4.0 MB stay in host memory (resident=False)"


def test_tensors_stay_on_the_host_when_they_need_more_than_half_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_module, "free_device_bytes", lambda device: 7_999_999)
    feed = make_feed(torch.zeros(1_000_000), device="cuda:0", seed=0)
    assert feed.reason == "tensors of 4.0 MB stay in host memory: more than half of the 8.0 MB free on cuda:0"


def test_tensors_move_to_the_device_when_they_need_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "free_device_bytes", lambda device: 8_000_000)
    feed = make_feed(torch.zeros(1_000_000), device="meta", seed=0)
    assert feed.reason == "tensors of 4.0 MB kept on meta: at most half of the 8.0 MB free on meta"


def test_tensors_stay_on_the_host_when_free_memory_is_not_known() -> None:
    feed = make_feed(torch.zeros(1_000_000), device="meta", seed=0)
    assert feed.reason == "tensors of 4.0 MB stay in host memory: free memory of meta is not known"


def test_resident_tensors_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "free_device_bytes", lambda device: 1_500_000)
    with pytest.raises(ConfigError) as caught:
        make_feed(torch.zeros(1_000_000), device="cuda:0", seed=0, resident=True)
    assert str(caught.value) == (
        "resident=True needs 4.0 MB on cuda:0, 1.5 MB is free\nhint: leave resident out to keep the data in host memory"
    )
