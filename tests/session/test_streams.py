"""Iterable data sets in a session: every item goes to one rank, once per epoch, and nothing hangs at uneven ends."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import outrider


class Shards(IterableDataset[torch.Tensor]):
    """Shards of unequal size, one after the other."""

    sizes = (3, 11, 1, 7, 2)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for shard, size in enumerate(self.sizes):
            for number in range(size):
                yield torch.tensor([100.0 * shard + number])


class Shuffled(Shards):
    """A shuffle buffer, and an epoch that it is told, as a streaming data set of Hugging Face."""

    epochs: list[int]

    def __init__(self) -> None:
        self.epochs = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        items = list(super().__iter__())
        random.shuffle(items)
        return iter(items)


ITEMS = [int(item) for item in Shards()]


def passes_of(folder: Path, data: Any, *, epochs: int = 1, **options: Any) -> list[list[int]]:
    model = nn.Linear(1, 1)
    got = []
    with outrider.Session(devices="cpu", run_dir=folder) as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), 1e-9))
        for _ in s.epochs(epochs):
            got.append([int(x) for batch in s.batches(data, **options) for x in batch])
    return got


def test_a_stream_comes_in_its_order_in_every_epoch(tmp_path: Path) -> None:
    assert passes_of(tmp_path, Shards(), epochs=2, batch_size=4, length=24) == [ITEMS] * 2


def test_the_rest_of_a_longer_stream_is_left_out(tmp_path: Path) -> None:
    assert passes_of(tmp_path, Shards(), batch_size=4, length=10) == [ITEMS[:10]]


def test_a_stream_is_told_the_epoch_and_draws_anew(tmp_path: Path) -> None:
    stream = Shuffled()
    first, second = passes_of(tmp_path, stream, epochs=2, batch_size=4, length=24)
    assert stream.epochs == [0, 1]
    assert sorted(first) == sorted(second) == sorted(ITEMS)
    assert first != second
    assert passes_of(tmp_path / "again", Shuffled(), batch_size=3, length=24) == [first]


def test_a_stream_in_a_data_loader(tmp_path: Path) -> None:
    loader = DataLoader(Shards(), batch_size=5, drop_last=True)
    assert passes_of(tmp_path, loader, length=24) == [ITEMS[:20]]


def test_a_stream_with_a_length_needs_no_other(tmp_path: Path) -> None:
    class Sized(Shards):
        def __len__(self) -> int:
            return 24

    assert passes_of(tmp_path, Sized(), batch_size=4) == [ITEMS]


def test_an_evaluation_reads_a_stream(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with outrider.Session(devices="cpu", run_dir=tmp_path) as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(2):
            mean = s.evaluate(lambda model, batch: batch.mean(), Shards(), batch_size=5, length=24)
            assert mean == pytest.approx(sum(ITEMS) / 24)


def message_of(call: Any) -> str:
    with pytest.raises(outrider.OutriderError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (Shards(), {}, "Shards is an iterable data set without a length, so nobody knows when an epoch ends"),
        (Shards(), {"length": 30}, "Shards ended after 24 samples, 30 were expected\nhint: pass length=24"),
        (Shards(), {"length": 24, "shuffle": True}, "shuffle=True, but Shards is an iterable data set"),
        (Shards(), {"length": 24, "order": [1]}, "order was given, but Shards is an iterable data set"),
        (Shards(), {"length": 24, "workers": 2}, "2 workers were asked for, but Shards is an iterable data set"),
        (iter([1, 2]), {"length": 2}, "list_iterator can be read only once, and every epoch reads it anew"),
        (torch.ones(4, 1), {"length": 4}, "length was given, but Tensor is not an iterable data set"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(tmp_path: Path, data: Any, options: Any, message: str) -> None:
    assert message_of(lambda: passes_of(tmp_path, data, batch_size=4, **options)).startswith(message)


def sitting(folder: Path, *, until: int | None = None, **options: Any) -> list[int]:
    model = nn.Linear(1, 1)
    got: list[int] = []
    often: dict[str, Any] = {"policy": "sync", "checkpoint_every": "0.000001s"}
    with outrider.Session(devices="cpu", run_dir=folder, **often, **options) as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), 1e-9))
        for _ in s.epochs(1):
            for number, batch in enumerate(s.batches(Shuffled(), batch_size=2, length=24)):
                if number == until:
                    raise RuntimeError("the power is gone")
                got += [int(x) for x in batch]
                s.step(model(batch).square().mean())
    return got


def test_a_stream_goes_on_in_the_middle_of_a_shard(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the power is gone"):
        sitting(tmp_path, until=7)
    rest = sitting(tmp_path, resume=tmp_path)
    assert 0 < len(rest) <= 10
    assert sitting(tmp_path / "whole")[-len(rest) :] == rest


THREE_RANKS = """
import json, random, sys
from pathlib import Path
import torch, outrider
from torch import nn
from torch.utils.data import IterableDataset

class Shards(IterableDataset):
    def __iter__(self):
        items = [torch.tensor([100.0 * shard + n]) for shard, size in enumerate((13, 41, 2, 9, 5)) for n in range(size)]
        random.shuffle(items)
        return iter(items)

folder = Path(sys.argv[1])
told = {}
for policy in ("sync", "cadence", "balanced"):
    model = nn.Linear(1, 1)
    with outrider.Session(policy=policy, run_dir=folder / policy, threads_per_rank=1) as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), 1e-9))
        got = []
        for epoch in s.epochs(2):
            for batch in s.batches(Shards(), batch_size=6, length=70):
                got += [int(x) for x in batch] if s._run.loop.samples else []
                s.step(model(batch).square().mean())
        mean = s.evaluate_together(lambda model, batch: batch.mean(), Shards(), batch_size=6, length=70)
        told[policy] = {"got": got, "mean": mean, "complete": s.metrics.is_complete}

class Split(IterableDataset):
    "Each rank has items of its own, as with a data set that was split by rank."
    def __iter__(self):
        return iter(torch.arange(s.rank, 70, 3).float().reshape(-1, 1))

try:
    with outrider.Session(policy="cadence", run_dir=folder / "split") as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), 1e-9))
        next(iter(s.batches(Split(), batch_size=6, length=20)))
except outrider.ConfigError as error:
    told["error"] = str(error)
(folder / f"told{s.rank}.json").write_text(json.dumps(told))
"""


@pytest.mark.slow
def test_three_ranks_share_five_uneven_shards_and_refuse_a_stream_that_was_split(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(THREE_RANKS)
    variables = {**os.environ, "OUTRIDER_DEVICES": "cpu,cpu@0.5,cpu@0.7", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "script.py", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"told{rank}.json").read_text()) for rank in range(3)]
    items = [100 * shard + n for shard, size in enumerate((13, 41, 2, 9, 5)) for n in range(size)]
    for policy in ("sync", "cadence", "balanced"):
        assert sorted(item for rank in ranks for item in rank[policy]["got"]) == sorted(items * 2)
        assert [rank[policy]["mean"] for rank in ranks] == [pytest.approx(sum(items) / 70)] * 3
        assert all(rank[policy]["complete"] for rank in ranks)
    assert all("the ranks disagree: the first sample of the stream is" in rank["error"] for rank in ranks)
