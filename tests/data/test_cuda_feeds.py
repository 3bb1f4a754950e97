"""The feeds on a real CUDA device; everything that needs no device is tested beside this file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from outrider.data.feed import Feed, WorkerFeed, free_device_bytes, make_feed
from outrider.data.keyed import sample_keys, uniform
from outrider.data.order import shuffled
from outrider.policy.effects import Lease

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NUM_SAMPLES = 1_000
ORDER = shuffled(NUM_SAMPLES, seed=0, epoch=0)


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index])


@pytest.fixture
def worker_feed() -> Iterator[Feed]:
    feed = make_feed(Rows(), device="cuda:0", seed=0, workers=2)
    yield feed
    feed.close()


def _all(feed: Feed) -> Tensor:
    feed.start_epoch(ORDER, 0)
    batches = list(Lease(0, NUM_SAMPLES).batches(7))
    feed.announce(batches)
    # Many copies under way at once: a reused host buffer would show.
    return torch.cat([feed.fetch(batch) for batch in batches])


def test_small_tensors_are_kept_on_the_device() -> None:
    feed = make_feed(torch.arange(NUM_SAMPLES), device="cuda:0", seed=0)
    fetched = _all(feed)
    assert feed.reason.startswith("tensors of 8000 bytes kept on cuda:0: at most half of the ")
    assert fetched.device == torch.device("cuda:0")
    assert torch.equal(fetched.cpu(), ORDER)


def test_rows_copied_from_the_host_arrive_whole() -> None:
    wide = torch.arange(NUM_SAMPLES)[:, None].expand(-1, 4_096).contiguous()
    fetched = _all(make_feed(wide, device="cuda:0", seed=0, resident=False))
    assert torch.equal(fetched.cpu(), wide[ORDER])


def test_batches_of_workers_arrive_on_the_device(worker_feed: WorkerFeed) -> None:
    fetched = _all(worker_feed)
    assert fetched.is_cuda
    assert torch.equal(fetched.cpu()[:, 0], ORDER)


def test_the_generator_of_the_device_is_left_alone() -> None:
    feed = make_feed(Rows(), device="cuda:0", seed=0)
    before = torch.cuda.get_rng_state()
    _all(feed)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_tensor_dataset_gives_its_items_on_the_device() -> None:
    feed = make_feed(TensorDataset(torch.zeros(4, 2), torch.arange(4)), device="cuda:0", seed=0)
    feed.start_epoch(torch.tensor([3, 1, 0, 2]), 0)
    _, labels = feed.fetch(next(Lease(0, 4).batches(2)))
    assert labels.tolist() == [3, 1]


def test_an_augmentation_gets_batch_and_keys_on_the_device() -> None:
    feed = make_feed(torch.arange(NUM_SAMPLES), device="cuda:0", seed=3, augment=lambda rows, keys: keys)
    keys = _all(feed)
    assert keys.is_cuda
    assert torch.equal(keys.cpu(), sample_keys(ORDER, seed=3, epoch=0))


def test_numbers_from_keys_are_those_of_the_host_and_can_be_captured() -> None:
    keys = sample_keys(torch.arange(NUM_SAMPLES, device="cuda:0"), seed=0, epoch=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = uniform(keys, 1)
    graph.replay()
    assert torch.equal(captured.cpu(), uniform(sample_keys(torch.arange(NUM_SAMPLES), seed=0, epoch=0), 1))


def test_free_memory_is_known() -> None:
    free_bytes = free_device_bytes(torch.device("cuda:0"))
    assert free_bytes is not None
    assert free_bytes > 0
