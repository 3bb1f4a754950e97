"""Samples read ahead by real worker processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from outrider.data import randomness
from outrider.data.feed import ItemFeed, WorkerFeed, make_feed
from outrider.data.order import in_order, shuffled
from outrider.errors import DataError, WaitError
from outrider.policy.effects import Batch, Lease

CPU = torch.device("cpu")


class Noisy(Dataset[Tensor]):
    """Each sample: its index and a number from each generator."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), np.random.random(), torch.rand(()).item()], dtype=torch.float64)


class Traced(Dataset[int]):
    """Each sample is the process that read it; the readings are counted across processes."""

    def __init__(self) -> None:
        self.num_read = multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        with self.num_read.get_lock():
            self.num_read.value += 1
        return os.getpid()


class Unpicklable(Noisy):
    def __reduce__(self) -> Any:
        raise AssertionError("the data set was pickled")


class Broken(Noisy):
    def __getitem__(self, index: int) -> Tensor:
        raise ValueError(f"no file for {index}")


class Crashing(Noisy):
    def __getitem__(self, index: int) -> Tensor:
        os._exit(3)


class Hanging(Noisy):
    def __getitem__(self, index: int) -> Tensor:
        time.sleep(1.5)  # longer than the time between two looks at the workers
        return torch.zeros(1)


@pytest.fixture
def feeds() -> Iterator[list[WorkerFeed]]:
    """Feeds put here are closed whatever the test does."""
    opened: list[WorkerFeed] = []
    yield opened
    for feed in opened:
        feed.close()


def _started(feeds: list[WorkerFeed], dataset: Any, *, workers: int = 1, **options: Any) -> WorkerFeed:
    feed = WorkerFeed(dataset, device=CPU, workers=workers, seed=7, **options)
    feeds.append(feed)
    feed.start_epoch(in_order(feed.num_samples), 0)
    return feed


def _in_rank(dataset: Any, batch: Batch) -> Any:
    feed = ItemFeed(dataset, device=CPU, seed=7)
    feed.start_epoch(in_order(feed.num_samples), 0)
    return feed.fetch(batch)


def test_batches_are_those_read_in_the_rank(feeds: list[WorkerFeed]) -> None:
    feed = _started(feeds, Noisy(), workers=2)
    batches = list(Lease(0, 23).batches(5))
    feed.announce(batches)
    fetched = torch.cat([feed.fetch(batch) for batch in batches])
    assert torch.equal(fetched, _in_rank(Noisy(), Batch(0, 23)))


def test_announced_batches_are_read_by_workers(feeds: list[WorkerFeed]) -> None:
    feed = _started(feeds, Traced())
    feed.announce([Batch(0, 2)])
    assert os.getpid() not in feed.fetch(Batch(0, 2)).tolist()


def test_announced_batches_are_read_before_they_are_fetched(feeds: list[WorkerFeed]) -> None:
    dataset = Traced()
    feed = _started(feeds, dataset)
    feed.announce([Batch(0, 2), Batch(2, 2)])
    deadline_s = time.monotonic() + 60
    while dataset.num_read.value < 4 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert dataset.num_read.value == 4


def test_batches_announced_late_are_read_ahead_too(feeds: list[WorkerFeed]) -> None:
    feed = _started(feeds, Traced())
    feed.announce([Batch(0, 2)])
    feed.announce([Batch(2, 2)])
    feed.fetch(Batch(0, 2))
    feed.announce([Batch(4, 2)])
    assert os.getpid() not in [*feed.fetch(Batch(2, 2)).tolist(), *feed.fetch(Batch(4, 2)).tolist()]


def test_a_batch_never_announced_is_read_in_the_rank(feeds: list[WorkerFeed]) -> None:
    feed = _started(feeds, Traced())
    feed.announce([Batch(0, 2)])
    assert feed.fetch(Batch(50, 2)).tolist() == [os.getpid()] * 2


def test_a_batch_never_announced_looks_as_if_it_had_been(feeds: list[WorkerFeed]) -> None:
    assert torch.equal(_started(feeds, Noisy()).fetch(Batch(3, 4)), _in_rank(Noisy(), Batch(3, 4)))


def test_a_batch_may_be_passed_over(feeds: list[WorkerFeed]) -> None:
    feed = _started(feeds, Noisy())
    feed.announce(Lease(0, 20).batches(2))
    assert torch.equal(feed.fetch(Batch(14, 2)), _in_rank(Noisy(), Batch(14, 2)))


def test_a_batch_passed_over_can_still_be_had(feeds: list[WorkerFeed]) -> None:
    feed = _started(feeds, Noisy())
    feed.announce(Lease(0, 20).batches(2))
    feed.fetch(Batch(14, 2))
    assert torch.equal(feed.fetch(Batch(0, 2)), _in_rank(Noisy(), Batch(0, 2)))


def test_batches_of_an_abandoned_epoch_do_not_turn_up_in_the_next(feeds: list[WorkerFeed]) -> None:
    feed = _started(feeds, Noisy())
    feed.announce(Lease(0, 20).batches(2))
    order = shuffled(23, seed=1, epoch=1)
    feed.start_epoch(order, 1)
    feed.announce([Batch(0, 2)])
    assert feed.fetch(Batch(0, 2))[:, 0].tolist() == order[:2].tolist()


def test_the_same_workers_serve_every_epoch_without_pickling_the_data_set(feeds: list[WorkerFeed]) -> None:
    feed = _started(feeds, Unpicklable())
    children = psutil.Process().children()
    feed.announce([Batch(0, 2)])
    feed.fetch(Batch(0, 2))
    feed.start_epoch(in_order(23), 1)
    feed.announce([Batch(0, 2)])
    feed.fetch(Batch(0, 2))
    assert psutil.Process().children() == children


def test_the_generators_of_the_rank_are_left_alone(feeds: list[WorkerFeed]) -> None:
    before = randomness.capture()
    feed = _started(feeds, Noisy())
    feed.announce([Batch(0, 2)])
    feed.fetch(Batch(0, 2))
    assert randomness.capture().equals(before)


def test_a_sample_that_cannot_be_read_is_named_as_in_the_rank(feeds: list[WorkerFeed]) -> None:
    feed = _started(feeds, Broken())
    feed.announce([Batch(4, 2)])
    with pytest.raises(DataError) as caught:
        feed.fetch(Batch(4, 2))
    assert caught.value.message == "sample 4 could not be read: ValueError: no file for 4"
    assert caught.value.hint == "try dataset[4] by itself"
    assert "raise ValueError" in str(caught.value.traceback)


def test_a_worker_that_crashes_is_an_error_that_says_so(feeds: list[WorkerFeed]) -> None:
    feed = _started(feeds, Crashing(), workers=2)
    feed.announce([Batch(4, 3)])
    with pytest.raises(DataError) as caught:
        feed.fetch(Batch(4, 3))
    assert str(caught.value) == (
        "a data worker (of 2) ended unexpectedly before samples 4, 5, 6 came\n"
        "hint: it crashed or ran out of memory; workers=0 reads the data in the rank and shows the error itself"
    )


def test_a_worker_that_hangs_is_not_waited_for_without_end(feeds: list[WorkerFeed]) -> None:
    feed = _started(feeds, Hanging(), wait_limit_s=0.5)
    feed.announce([Batch(4, 1)])
    with pytest.raises(WaitError) as caught:
        feed.fetch(Batch(4, 1))
    assert str(caught.value) == (
        "waited 0.5 s for the data workers to read sample 4\n"
        "hint: workers=0 reads the data in the rank and shows where it hangs"
    )


def test_a_slow_batch_within_the_limit_arrives(feeds: list[WorkerFeed]) -> None:
    feed = _started(feeds, Hanging())
    feed.announce([Batch(4, 1)])
    assert feed.fetch(Batch(4, 1)).tolist() == [[0.0]]


def test_the_signal_handler_of_the_rank_is_kept(feeds: list[WorkerFeed]) -> None:
    before = signal.getsignal(signal.SIGCHLD)
    _started(feeds, Noisy())
    assert signal.getsignal(signal.SIGCHLD) is before


def test_nothing_is_left_behind_after_close(feeds: list[WorkerFeed]) -> None:
    children, threads = psutil.Process().children(), set(threading.enumerate())
    feed = _started(feeds, Noisy(), workers=2)
    feed.announce(Lease(0, 20).batches(2))
    feed.fetch(Batch(0, 2))
    feed.close()
    feed.close()
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=10)
    assert psutil.Process().children() == children
    assert set(threading.enumerate()) == threads


def test_workers_are_chosen_where_asked_for(feeds: list[WorkerFeed]) -> None:
    feed = make_feed(Noisy(), device="cpu", seed=0, workers=2)
    assert isinstance(feed, WorkerFeed)
    assert feed.reason == "Noisy is read ahead by workers (2)"
