"""What a user's loop goes over: data sets and data loaders, once or again and again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import outrider
from outrider.data.order import shuffled

SEED, SIZE = 5, 40


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[outrider.Session]:
    """On one device, with something to train."""
    monkeypatch.delenv("OUTRIDER_DEVICES", raising=False)
    before = torch.get_num_threads()
    model = nn.Linear(3, 1)
    with outrider.Session(devices="cpu", run_dir=tmp_path, seed=SEED) as session:
        session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        yield session
    torch.set_num_threads(before)


def numbers(size: int = SIZE) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def tens(samples: list[tuple[Tensor]]) -> list[int]:
    return [10 * int(sample[0]) for sample in samples]


def test_a_data_loader_brings_its_batch_size_and_its_order(session: outrider.Session) -> None:
    seen = [batch.tolist() for (batch,) in session.batches(DataLoader(numbers(5), batch_size=2))]
    assert seen == [[0, 1], [2, 3, 4]]


def test_a_data_loader_that_shuffles_is_shuffled_by_seed_and_epoch(session: outrider.Session) -> None:
    loader = DataLoader(numbers(), batch_size=SIZE, shuffle=True)
    seen = [batch.tolist() for _ in session.epochs(2) for (batch,) in session.batches(loader)]
    assert seen == [shuffled(SIZE, seed=SEED, epoch=epoch).tolist() for epoch in range(2)]


def test_a_data_loader_brings_its_collation(session: outrider.Session) -> None:
    seen = list(session.batches(DataLoader(numbers(4), batch_size=2, collate_fn=tens)))
    assert seen == [[0, 10], [20, 30]]


def test_what_is_said_stands_above_what_a_data_loader_says(session: outrider.Session) -> None:
    seen = list(session.batches(DataLoader(numbers(4), batch_size=2), batch_size=4, collate=tens))
    assert seen == [[0, 10, 20, 30]]


def test_a_data_set_may_be_collated_differently_the_next_time(session: outrider.Session) -> None:
    same = numbers(4)
    first = list(session.batches(same, batch_size=4, shuffle=False, collate=tens))
    second = list(session.batches(same, batch_size=4, shuffle=False, collate=len))
    assert (first, second) == ([[0, 10, 20, 30]], [4])


def test_every_sample_comes_once_without_epochs_too(session: outrider.Session) -> None:
    passes = [[int(n) for (batch,) in session.batches(numbers(), batch_size=7) for n in batch] for _ in range(2)]
    assert [sorted(one) for one in passes] == [list(range(SIZE))] * 2
    assert passes[0] != passes[1]


def test_an_epoch_may_go_over_two_data_sets(session: outrider.Session) -> None:
    for _ in session.epochs(1):
        sizes = [len(batch[0]) for one in (numbers(10), numbers(6)) for batch in session.batches(one, batch_size=4)]
    assert session.metrics is not None
    assert session.metrics.samples == 16
    assert sizes == [4, 4, 2, 4, 2]


class Opened(Dataset[Tensor]):
    """Says how many of its kind are held by anyone."""

    alive = 0

    def __init__(self) -> None:
        Opened.alive += 1

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1)

    def __del__(self) -> None:
        Opened.alive -= 1


def test_a_loop_that_makes_new_data_every_time_does_not_keep_it_all(session: outrider.Session) -> None:
    for _ in range(20):
        list(session.batches(Opened(), batch_size=4))
    assert Opened.alive < 10
