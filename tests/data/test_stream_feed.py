"""Streams by number: samples of other ranks are skipped, whole shards without being opened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.data.sharded_stream import ShardedStream
from outrider.data.stream_feed import KEPT_ITEMS, StreamFeed
from outrider.errors import ConfigError, DataError
from outrider.policy.effects import Batch

CPU = torch.device("cpu")


class Numbers:
    """Counts how often it is read from the beginning."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter(range(self.size))


class Opened:
    """Shards of numbers; notes which of them were opened."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.shards: list[int] = []

    def read(self, shard: int) -> Iterator[int]:
        self.shards.append(shard)
        return iter(range(1_000 * shard, 1_000 * shard + self.sizes[shard]))

    def stream(self, **options: Any) -> ShardedStream:
        return ShardedStream(range(len(self.sizes)), sizes=self.sizes, read=self.read, **options)


def feed_of(stream: Any, length: int) -> StreamFeed:
    feed = StreamFeed(stream, length=length, device=CPU, seed=0, collate=list)
    feed.start_epoch(torch.arange(length), 0)
    return feed


def test_a_far_sample_and_those_before_it_are_read_in_one_go() -> None:
    stream = Numbers(1_000)
    feed = feed_of(stream, 1_000)
    assert feed.fetch(Batch(900, 3)) == [900, 901, 902]
    assert feed.fetch(Batch(902 - KEPT_ITEMS + 1, 1)) == [902 - KEPT_ITEMS + 1]
    assert stream.begun == 1
    assert feed.fetch(Batch(5, 2)) == [5, 6]
    assert stream.begun == 2


def test_shards_of_other_ranks_are_not_opened() -> None:
    opened = Opened([400, 500, 0, 600, 100])
    feed = feed_of(opened.stream(), 1_600)
    assert feed.fetch(Batch(10, 2)) == [10, 11]
    assert feed.fetch(Batch(1_200, 2)) == [3_300, 3_301]
    assert opened.shards == [0, 3]


def test_shards_come_in_another_order_in_each_epoch() -> None:
    stream = Opened([2] * 8).stream(shuffle=True, seed=3)
    first = list(stream)
    stream.set_epoch(1)
    assert sorted(stream) == sorted(first)
    assert list(stream) != first


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), st.data())
def test_skipping_gives_the_samples_of_reading(sizes: list[int], data: st.DataObject) -> None:
    whole, at, got, expected = list(Opened(sizes).stream()), 0, [], []
    items = iter(Opened(sizes).stream())
    while at < len(whole):
        count = data.draw(st.integers(0, len(whole) - at))
        items.skip(count)
        at += count
        if at < len(whole):
            got.append(next(items))
            expected.append(whole[at])
            at += 1
    assert got == expected


def test_a_shard_that_is_shorter_than_its_size_is_an_error() -> None:
    stream = ShardedStream(["a", "b"], sizes=[2, 2], read=lambda shard: iter([shard]))
    with pytest.raises(DataError, match="a ended before sample 1, its size was given as 2"):
        list(stream)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [([1], "2 shards were given, and 1 sizes"), ([0, 0], r"sizes must be numbers of samples, got \[0, 0\]")],
)
def test_sizes_that_cannot_be_are_refused(sizes: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardedStream(["a", "b"], sizes=sizes, read=iter)
