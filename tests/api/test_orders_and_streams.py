"""`train()` on samplers, orders, DataLoaders and streams: each position once per epoch, also where a run is resumed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import outrider
from outrider.data.sharded_stream import ShardedStream

pytestmark = pytest.mark.usefixtures("one_thread")

Trainer = Callable[..., outrider.Run]
NUMBERS = TensorDataset(torch.arange(20).float().reshape(20, 1))
Seen = list[list[int]]


class Counted(IterableDataset[torch.Tensor]):
    """The numbers from 0 on, from the beginning each time, shifted by the epoch where it is told."""

    def __init__(self, size: int = 24) -> None:
        self._size = size
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.tensor([100.0 * self._epoch + number]) for number in range(self._size)])


class CountedWithLength(Counted):
    def __len__(self) -> int:
        return self._size


class Curriculum(Sampler[int]):
    """Harder samples in later epochs, as many in each."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, self.epoch + 8))


class Growing(Curriculum):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8 + self.epoch))


class Buckets(Sampler[list[int]]):
    """Batches of 1, 2, 3, 4 and 5 samples, the smallest first in even epochs and last in odd ones."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        batches = [list(range(first, first + size)) for first, size in zip((0, 1, 3, 6, 10), range(1, 6), strict=True)]
        return iter(batches[::-1] if self.epoch % 2 else batches)


class FewerBuckets(Buckets):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__())[self.epoch :])


BUCKETS = [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13, 14]]


def make_model() -> nn.Module:
    return nn.Linear(1, 1)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.fixture
def seen() -> Seen:
    """The samples of each batch."""
    return []


@pytest.fixture
def step(seen: Seen) -> Callable[[nn.Module, Any], torch.Tensor]:
    """A step that notes its samples."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        numbers = batch[0] if isinstance(batch, list | tuple) else batch
        seen.append([int(number) for number in numbers])
        return (model(numbers / 100) - 1).square().mean()

    return step


@pytest.fixture
def train(one_rank: None, step: Any, tmp_path: Path) -> Trainer:
    """`train()` on one rank, in batches of 4 where no loader says their size."""

    def train(dataset: Any, **options: Any) -> outrider.Run:
        defaults: dict[str, Any] = {"devices": "cpu", "policy": "cadence", "run_dir": tmp_path / "run"}
        if not isinstance(dataset, DataLoader):
            defaults["batch_size"] = 4
        if "steps" not in options:
            defaults["epochs"] = 2
        return outrider.train(make_model, make_optimizer, step, dataset, **{**defaults, **options})

    return train


def flat(batches: Seen) -> list[int]:
    return [sample for batch in batches for sample in batch]


def negative(samples: list[Any]) -> torch.Tensor:
    """A collate function of an evaluation, told by its sign."""
    return -torch.stack([sample[0] for sample in samples])


def test_an_evaluation_uses_batch_size_and_collate_of_its_own_loader(train: Trainer) -> None:
    evaluated: list[list[int]] = []

    def evaluate(model: nn.Module, batch: Any) -> float:
        evaluated.append([int(number) for number in batch])
        return float(batch.mean())

    loader = DataLoader(NUMBERS, batch_size=8, collate_fn=negative)
    run = train(DataLoader(NUMBERS, 4), eval_dataset=loader, evaluate=evaluate, epochs=1)
    run.join()
    assert evaluated == [[-n for n in range(8)], [-n for n in range(8, 16)], [-16, -17, -18, -19]]
    assert [epoch.eval for epoch in run] == [-9.5]


def test_workers_of_an_evaluation_read_its_data(train: Trainer) -> None:
    loader = DataLoader(NUMBERS, batch_size=8, num_workers=1, collate_fn=negative)
    run = train(NUMBERS, eval_dataset=loader, evaluate=lambda model, batch: float(batch.mean()), epochs=1)
    assert [epoch.eval for epoch in run] == [-9.5]


def test_a_subset_is_used_once_in_a_new_order_each_epoch(train: Trainer, seen: Seen) -> None:
    train(DataLoader(NUMBERS, 4, sampler=SubsetRandomSampler([1, 3, 5, 7, 9, 11, 13]))).join()
    assert sorted(flat(seen[:2])) == sorted(flat(seen[2:])) == [1, 3, 5, 7, 9, 11, 13]
    assert [len(batch) for batch in seen] == [4, 3, 4, 3]
    assert seen[:2] != seen[2:]


def test_a_weighted_sampler_repeats_samples(train: Trainer, seen: Seen) -> None:
    trained = train(NUMBERS, order=WeightedRandomSampler([1.0] * 2 + [0.0] * 18, 32), epochs=1).join()
    assert (len(flat(seen)), set(flat(seen))) == (32, {0, 1})
    assert trained.epochs[0].samples == 32


def test_an_order_of_ones_own_decides_the_order(train: Trainer, seen: Seen) -> None:
    orders = [[3, 1, 4, 1, 5, 9, 2, 6], [8, 7, 6, 5, 4, 3, 2, 1]]
    train(NUMBERS, order=lambda epoch: orders[epoch]).join()
    assert seen == [[3, 1, 4, 1], [5, 9, 2, 6], [8, 7, 6, 5], [4, 3, 2, 1]]


def test_a_curriculum_is_told_the_epoch(train: Trainer, seen: Seen) -> None:
    train(DataLoader(NUMBERS, 8, sampler=Curriculum()), epochs=3).join()
    assert seen == [list(range(start, start + 8)) for start in range(3)]


@pytest.mark.parametrize("policy", ["auto", "sync", "balanced", "cadence", "async"])
def test_an_order_that_was_cut_goes_on_where_it_was(train: Trainer, seen: Seen, tmp_path: Path, policy: str) -> None:
    options: dict[str, Any] = {"policy": policy, "checkpoint_every": 0.2, "speed_hints": [1], "anchor": 1}
    options["order"] = RandomSampler(range(20), generator=torch.Generator().manual_seed(2))
    whole = train(NUMBERS, **options, steps=15, run_dir=tmp_path / "whole").join()
    expected, seen[:] = list(seen), []
    train(NUMBERS, **options, steps=8).join()
    options["order"] = RandomSampler(range(20), generator=torch.Generator().manual_seed(2))
    resumed = train(NUMBERS, **options, steps=15, resume="auto").join()
    assert seen == expected
    assert all(torch.equal(one, resumed.state_dict[name]) for name, one in whole.state_dict.items())


def test_an_order_that_cannot_be_drawn_again_does_not_go_on_in_the_middle(train: Trainer) -> None:
    own = random.Random(1)

    def order(epoch: int) -> list[int]:
        return own.sample(range(20), 20)

    train(NUMBERS, order=order, steps=3, checkpoint_every=0.2).join()
    with pytest.raises(outrider.ConfigError, match="order drew another sequence than before the checkpoint"):
        train(NUMBERS, order=order, steps=8, resume="auto").join()


def test_the_settings_of_a_loader_are_taken(train: Trainer, seen: Seen) -> None:
    def doubled(samples: list[Any]) -> torch.Tensor:
        return 2 * torch.stack([sample[0] for sample in samples])

    train(DataLoader(NUMBERS, 6, collate_fn=doubled, drop_last=True), epochs=1).join()
    assert seen == [[2 * number for number in range(start, start + 6)] for start in (0, 6, 12)]


def test_what_is_passed_beside_a_loader_goes_first(train: Trainer, seen: Seen) -> None:
    train(DataLoader(NUMBERS, 6, shuffle=True), epochs=1, batch_size=10, shuffle=False).join()
    assert seen == [list(range(10)), list(range(10, 20))]


def test_the_generator_of_a_loader_decides_the_order(train: Trainer, seen: Seen, tmp_path: Path) -> None:
    for number, seed in enumerate((1, 1, 2)):
        loader = DataLoader(NUMBERS, 20, shuffle=True, generator=torch.Generator().manual_seed(seed))
        train(loader, epochs=1, run_dir=tmp_path / str(number)).join()
    assert seen[0] == seen[1] != seen[2]
    assert sorted(seen[2]) == list(range(20))


def test_workers_of_a_loader_read_the_sequence_of_its_sampler(train: Trainer, seen: Seen) -> None:
    data: Any = [(torch.tensor([float(number)]),) for number in range(20)]
    train(DataLoader(data, 4, sampler=SubsetRandomSampler(range(10)), num_workers=1), epochs=1).join()
    assert sorted(flat(seen)) == list(range(10))


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (Counted(), {"length": 24}),
        (CountedWithLength(), {}),
        (lambda: Counted(), {"length": 24}),
        (DataLoader(Counted(), 4), {"length": 24}),
        (DataLoader(CountedWithLength(), 4), {}),
        (Counted(99), {"length": 24}),
    ],
    ids=["length", "own length", "function", "loader", "loader with length", "longer"],
)
def test_a_stream_comes_once_per_epoch(train: Trainer, seen: Seen, data: Any, options: dict[str, Any]) -> None:
    train(data, **options).join()
    assert flat(seen[:6]) == list(range(24))
    assert flat(seen[6:]) == list(range(100, 124))


def test_batches_of_a_batch_sampler_are_taken_whole_and_a_step_counts_each(train: Trainer, seen: Seen) -> None:
    trained = train(DataLoader(NUMBERS, batch_sampler=Buckets())).join()
    assert seen == [*BUCKETS, *BUCKETS[::-1]]
    assert [epoch.samples for epoch in trained.epochs] == [5, 5]


def test_a_run_with_a_batch_sampler_goes_on_in_the_middle(train: Trainer, seen: Seen) -> None:
    loader = DataLoader(NUMBERS, batch_sampler=Buckets())
    train(loader, steps=7, checkpoint_every=0.2).join()
    train(loader, steps=10, resume="auto").join()
    assert seen == [*BUCKETS, *BUCKETS[::-1]]


def test_a_stream_goes_on_in_the_middle(train: Trainer, seen: Seen) -> None:
    train(Counted(), length=24, steps=8, checkpoint_every=0.25).join()
    assert flat(seen) == [*range(24), *range(100, 108)]
    train(Counted(), length=24, steps=12, resume="auto").join()
    assert flat(seen) == [*range(24), *range(100, 124)]


def test_a_resumed_run_opens_no_shard_that_is_done(train: Trainer, seen: Seen) -> None:
    opened: list[int] = []

    def read(shard: int) -> Iterator[torch.Tensor]:
        opened.append(shard)
        return iter(torch.arange(200 * shard, 200 * shard + 200).float().reshape(200, 1))

    stream = ShardedStream(range(6), sizes=[200] * 6, read=read)
    train(stream, batch_size=100, steps=10, checkpoint_every=0.5).join()
    assert flat(seen) == list(range(1_000))
    opened.clear()
    train(stream, batch_size=100, steps=12, resume="auto").join()
    assert flat(seen) == list(range(1_200))
    # The first one to compare the ranks, the fifth for samples that may be asked for again.
    assert set(opened) == {0, 4, 5}


def test_the_lab_trains_on_the_same_samples(train: Trainer, step: Any, seen: Seen) -> None:
    order = SubsetRandomSampler(range(0, 20, 2), generator=torch.Generator().manual_seed(4))
    trained = train(NUMBERS, order=order).join()
    expected, seen[:] = list(seen), []
    options: dict[str, Any] = {"batch_size": 4, "epochs": 2, "policy": "cadence"}
    ran = outrider.lab(make_model, make_optimizer, step, NUMBERS, order=order, speeds=(1.0,), **options)
    assert seen == expected
    assert all(torch.equal(one, trained.state_dict[name]) for name, one in ran.state_dict().items())


@pytest.mark.parametrize("kind", ["sampler", "batch sampler", "loader", "stream"])
def test_a_recorded_run_is_done_again_on_the_same_samples(
    train: Trainer, step: Any, seen: Seen, tmp_path: Path, kind: str
) -> None:
    sampler = SubsetRandomSampler(range(12), generator=torch.Generator().manual_seed(4))
    data: dict[str, tuple[Any, dict[str, Any]]] = {
        "sampler": (NUMBERS, {"order": sampler, "batch_size": 4}),
        "batch sampler": (DataLoader(NUMBERS, batch_sampler=Buckets()), {}),
        "loader": (DataLoader(NUMBERS, 4, sampler=sampler, collate_fn=lambda samples: 2 * samples[0][0][None]), {}),
        "stream": (Counted(), {"length": 24, "batch_size": 4}),
    }
    dataset, options = data[kind]
    train(dataset, **options, record_schedule=True).join()
    expected, seen[:] = list(seen), []
    again = outrider.replay(
        tmp_path / "run", make_model, make_optimizer, step, dataset, **options, epochs=2, policy="cadence"
    )
    assert seen == expected
    assert again.departure is None


@pytest.mark.parametrize(
    ("data", "options", "message", "hint"),
    [
        (
            DataLoader(NUMBERS, batch_sampler=[[0, 1], [2]]),
            {"batch_size": 4},
            "batch_size was given, but list decides that already",
            "leave batch_size out",
        ),
        (
            DataLoader(NUMBERS, batch_sampler=[[0, 1], [2]]),
            {"shuffle": True},
            "shuffle was given, but list decides that already",
            "leave shuffle out",
        ),
        *(
            (
                DataLoader(NUMBERS, batch_sampler=[[0, 1], [2]]),
                {name: 2},
                f"{name} was given, but list makes batches that are taken whole",
                f"leave {name} out, and let list make batches that fit",
            )
            for name in ("accumulate", "micro_batch")
        ),
        (
            DataLoader(NUMBERS, batch_sampler=FewerBuckets()),
            {},
            "FewerBuckets lists 5 batches in epoch 0 and 4 in epoch 1, and all epochs of train() have one length",
            "use a Session, where epochs may differ: for batch in s.batches(dataset, order=...)",
        ),
        (
            NUMBERS,
            {"order": Growing()},
            "Growing lists 8 samples in epoch 0 and 9 in epoch 1, and all epochs of train() have one length",
            "use a Session, where epochs may differ: for batch in s.batches(dataset, order=...)",
        ),
        (NUMBERS, {"order": lambda epoch: [20]}, "<lambda> lists sample 20, the data set has samples 0 to 19", None),
        (NUMBERS, {"order": 3}, "order must be a function of the epoch or a sampler, got int", None),
        (NUMBERS, {"order": [1, 2], "shuffle": True}, "shuffle was given, but list decides that already", None),
        (
            DataLoader(NUMBERS, 2, sampler=Curriculum()),
            {"order": [1, 2]},
            "order was given, but Curriculum decides that already",
            "leave order out",
        ),
        (NUMBERS, {"length": 8}, "length was given, but TensorDataset is not an iterable data set", "leave length out"),
        (lambda: NUMBERS, {"length": 8}, "length was given, but TensorDataset is not an iterable data set", None),
        (
            lambda: (number for number in torch.ones(20, 1)),
            {"length": 20},
            "generator can be read only once, and every epoch reads it anew",
            "pass an object whose __iter__ starts from the beginning, such as an IterableDataset",
        ),
        (Counted(), {"length": 0}, "length must be a whole number >= 1, got 0", None),
        (Counted(), {"length": 30}, "Counted ended after 24 samples, 30 were expected", "pass length=24"),
        (
            Counted(),
            {"length": 8, "shuffle": True},
            "shuffle=True, but Counted is an iterable data set, which has an order of its own",
            None,
        ),
        (
            DataLoader(Counted(), 4, num_workers=2),
            {"length": 8},
            "2 workers were asked for, but Counted is an iterable data set: each worker would read all of it",
            None,
        ),
        (
            NUMBERS,
            {"eval_dataset": DataLoader(NUMBERS, batch_size=4, drop_last=True), "evaluate": print},
            "eval_dataset is a DataLoader with drop_last=True, and an evaluation takes each sample once",
            "leave drop_last out",
        ),
        (
            NUMBERS,
            {"eval_dataset": DataLoader(NUMBERS, batch_size=4, sampler=SubsetRandomSampler([1, 2])), "evaluate": print},
            "eval_dataset is a DataLoader with SubsetRandomSampler, and an evaluation takes each sample once",
            "pass the samples to evaluate: eval_dataset=torch.utils.data.Subset(dataset, indices)",
        ),
        (
            NUMBERS,
            {"eval_dataset": DataLoader(Counted(), batch_size=4), "evaluate": print},
            "eval_dataset is Counted, an iterable data set",
            "make it a list of its samples: eval_dataset=list(stream)",
        ),
        (
            NUMBERS,
            {"eval_dataset": Counted(), "evaluate": print},
            "eval_dataset is Counted, an iterable data set",
            "make it a list of its samples: eval_dataset=list(stream)",
        ),
        (
            DataLoader(NUMBERS, batch_size=None),
            {},
            "a DataLoader with batch_size=None decides itself which samples come when",
            None,
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    train: Trainer, data: Any, options: dict[str, Any], message: str, hint: str | None
) -> None:
    with pytest.raises(outrider.OutriderError) as caught:
        train(data, **options).join()
    assert caught.value.message == message
    assert hint is None or caught.value.hint == hint


def test_the_lab_refuses_a_loader() -> None:
    with pytest.raises(outrider.ConfigError, match="the lab takes a data set, not a DataLoader"):
        outrider.lab(dict, dict, dict, DataLoader(NUMBERS, 4), speeds=(1.0,))  # type: ignore[arg-type]


def test_torchs_batch_sampler_is_only_a_batch_size(train: Trainer, seen: Seen) -> None:
    sampler = BatchSampler(SubsetRandomSampler(range(9)), 4, drop_last=True)
    train(DataLoader(NUMBERS, batch_sampler=sampler), epochs=1).join()
    assert [len(batch) for batch in seen] == [4, 4]
    assert max(Counter(flat(seen)).values()) == 1
