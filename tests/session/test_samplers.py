"""Samplers, batch samplers and orders of the user's own: each position of their sequence is used once, on any ranks."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import outrider
from outrider.data.sample_sequence import DrawnSequence, SampleSequence

NUMBERS = TensorDataset(torch.arange(20).float().reshape(20, 1))


class Buckets(Sampler[list[int]]):
    """Batches of unequal size, as a sampler makes them that sorts by length."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9, 10], list(range(11, 20))]
        for number in torch.randperm(4, generator=self.generator).tolist():
            yield batches[number]


class Curriculum(Sampler[int]):
    """More samples in each epoch, the easy ones first; its own random numbers."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(5 * self.epoch + 5), 5 * self.epoch + 5))


def passes_of(folder: Path, data: Any, *, epochs: int = 1, **options: Any) -> list[list[list[int]]]:
    """The samples of each batch, on one rank."""
    model = nn.Linear(1, 1)
    got = []
    with outrider.Session(devices="cpu", run_dir=folder) as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), 1e-6))
        for _ in s.epochs(epochs):
            batches = s.batches(data, **options)
            got.append([[int(x) for x in batch[0]] for batch in batches])
            assert len(batches) == len(got[-1])
    return got


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def test_a_subset_is_used_once_in_a_new_order_each_epoch(tmp_path: Path) -> None:
    loader = DataLoader(NUMBERS, 4, sampler=SubsetRandomSampler([1, 3, 5, 7, 9, 11]))
    first, second = passes_of(tmp_path, loader, epochs=2)
    assert sorted(flat(first)) == sorted(flat(second)) == [1, 3, 5, 7, 9, 11]
    assert first != second
    assert [len(batch) for batch in first] == [4, 2]


def test_a_weighted_sampler_repeats_samples(tmp_path: Path) -> None:
    weights = [1.0] * 2 + [0.0] * 18
    (got,) = passes_of(tmp_path, DataLoader(NUMBERS, 4, sampler=WeightedRandomSampler(weights, 32)))
    assert len(flat(got)) == 32
    assert set(flat(got)) == {0, 1}


def test_an_order_of_ones_own_decides_the_order(tmp_path: Path) -> None:
    orders = [[3, 1, 4, 1, 5, 9], [2, 6]]
    got = passes_of(tmp_path, NUMBERS, epochs=2, batch_size=2, order=lambda epoch: orders[epoch])
    assert [flat(one) for one in got] == orders


def test_a_curriculum_is_told_the_epoch(tmp_path: Path) -> None:
    got = passes_of(tmp_path, DataLoader(NUMBERS, 5, sampler=Curriculum()), epochs=2)
    assert [sorted(flat(one)) for one in got] == [list(range(5)), list(range(10))]


def test_a_batch_sampler_decides_whole_batches(tmp_path: Path) -> None:
    first, second = passes_of(tmp_path, DataLoader(NUMBERS, batch_sampler=Buckets()), epochs=2)
    assert sorted(len(batch) for batch in first) == [2, 3, 6, 9]
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(20))
    assert first != second


@pytest.mark.parametrize(
    ("sampler", "batch_size", "name"),
    [(Buckets(), [2, 3, 6, 9], "Buckets"), ([[0, 1, 2, 3], [4, 5, 6, 7]], 4, "list")],
    ids=["unequal", "equal"],
)
def test_the_record_has_the_sizes_of_a_batch_samplers_batches(
    tmp_path: Path, sampler: Any, batch_size: Any, name: str
) -> None:
    (got,) = passes_of(tmp_path, DataLoader(NUMBERS, batch_sampler=sampler))
    facts = {"name": name, "batches": len(got), "samples": len(flat(got))}
    for file in ("record.json", "config.json"):
        options = json.loads((tmp_path / file).read_text())["options"]
        assert (options["batch_size"], options["batch_sampler"]) == (batch_size, facts)


def test_the_record_has_the_sizes_of_all_passes(tmp_path: Path) -> None:
    class Growing(Sampler[list[int]]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[list[int]]:
            return iter([list(range(self.epoch + 2))])

    passes_of(tmp_path, DataLoader(NUMBERS, batch_sampler=Growing()), epochs=2)
    options = json.loads((tmp_path / "record.json").read_text())["options"]
    assert options["batch_size"] == [2, 3]
    assert options["batch_sampler"] == {"name": "Growing", "batches": 1, "samples": 3}


def test_the_record_of_plain_passes_after_those_of_a_batch_sampler_is_plain(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with outrider.Session(devices="cpu", run_dir=tmp_path) as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), 1e-6))
        for data, size in ((DataLoader(NUMBERS, batch_sampler=Buckets()), None), (NUMBERS, 4)):
            for _ in s.batches(data, **({} if size is None else {"batch_size": size})):
                pass
    options = json.loads((tmp_path / "record.json").read_text())["options"]
    assert "batch_sampler" not in options
    assert 4 in options["batch_size"]


def test_workers_read_the_batches_of_a_batch_sampler(tmp_path: Path) -> None:
    data = [(torch.tensor([float(number)]),) for number in range(20)]
    (got,) = passes_of(tmp_path, DataLoader(data, batch_sampler=Buckets(), num_workers=1))  # type: ignore[arg-type]
    assert sorted(len(batch) for batch in got) == [2, 3, 6, 9]


def test_torchs_batch_sampler_is_only_a_batch_size(tmp_path: Path) -> None:
    plain = DataLoader(NUMBERS, batch_sampler=BatchSampler(SequentialSampler(NUMBERS), 8, drop_last=True))
    assert passes_of(tmp_path, plain) == [[list(range(8)), list(range(8, 16))]]
    repeated = RandomSampler(NUMBERS, replacement=True, num_samples=40)
    assert len(flat(passes_of(tmp_path / "repeated", DataLoader(NUMBERS, 8, sampler=repeated))[0])) == 40


def test_the_generator_of_a_sampler_decides(tmp_path: Path) -> None:
    def drawn(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        sampler = SubsetRandomSampler(range(20), generator=generator)
        return passes_of(tmp_path / f"{seed}-{torch.rand(1).item()}", DataLoader(NUMBERS, 4, sampler=sampler))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_an_epoch_has_its_sequence_whatever_was_drawn_before() -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    state = generator.get_state()
    sequence = SampleSequence(source=SubsetRandomSampler(range(20), generator=generator))

    def drawn(one: SampleSequence, epoch: int) -> list[int]:
        return one.draw(num_samples=20, seed=0, epoch=epoch).indices.tolist()

    in_a_row = [drawn(sequence, epoch) for epoch in range(3)]
    fresh = SubsetRandomSampler(range(20), generator=torch.Generator().manual_seed(3))
    assert drawn(SampleSequence(source=fresh), 2) == in_a_row[2]
    assert len({tuple(one) for one in in_a_row}) == 3
    assert torch.equal(generator.get_state(), state)


def test_an_evaluation_of_a_subset_is_of_that_subset(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with outrider.Session(devices="cpu", run_dir=tmp_path) as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        loader = DataLoader(NUMBERS, 2, sampler=SubsetRandomSampler([2, 4, 9]))
        assert s.evaluate(lambda model, batch: batch[0].mean(), loader) == 5.0
        assert s.evaluate_together(lambda model, batch: batch[0].mean(), loader) == 5.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": lambda epoch: [0, 20]}, "<lambda> lists sample 20, the data set has samples 0 to 19"),
        ({"order": lambda epoch: []}, "<lambda> lists no samples in epoch 0"),
        ({"order": lambda epoch: [0.5]}, "<lambda> must list indices of samples, got float"),
        ({"order": lambda epoch: 1 / 0}, "<lambda> could not list the samples of epoch 0: ZeroDivisionError"),
        ({"order": 3}, "order must be a function of the epoch or a sampler, got int"),
        ({"order": [1, 2], "shuffle": True}, "shuffle was given, but list decides that already"),
    ],
)
def test_what_cannot_be_an_order_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(outrider.OutriderError) as caught:
        passes_of(tmp_path, NUMBERS, batch_size=4, **options)
    assert str(caught.value).startswith(message)


def test_a_batch_size_beside_a_batch_sampler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(outrider.ConfigError, match="batch_size was given, but Buckets decides that already"):
        passes_of(tmp_path, DataLoader(NUMBERS, batch_sampler=Buckets()), batch_size=4)


def test_a_sequence_survives_the_way_to_another_rank() -> None:
    for source in (Buckets(), SubsetRandomSampler(range(7))):
        sequence = SampleSequence(source=source, has_batches=isinstance(source, Buckets))
        drawn = sequence.draw(num_samples=20, seed=1, epoch=2)
        assert DrawnSequence.from_text(drawn.to_text()).digest == drawn.digest
        assert sequence.draw(num_samples=20, seed=1, epoch=2).digest == drawn.digest
        assert sequence.draw(num_samples=20, seed=1, epoch=3).digest != drawn.digest


def sitting(folder: Path, order: Any, *, until: int | None = None, **options: Any) -> list[int]:
    """The samples of an epoch of 20 in batches of 2, or of its first batches."""
    model = nn.Linear(1, 1)
    got: list[int] = []
    often = {"policy": "sync", "checkpoint_every": "0.000001s"}
    with outrider.Session(devices="cpu", run_dir=folder, **often, **options) as s:  # type: ignore[typeddict-item]
        s.prepare(model, torch.optim.SGD(model.parameters(), 1e-6))
        for _ in s.epochs(1):
            for number, (batch,) in enumerate(s.batches(NUMBERS, batch_size=2, order=order)):
                if number == until:
                    raise RuntimeError("the power is gone")
                got += [int(x) for x in batch]
                s.step(model(batch).square().mean())
    return got


def test_a_sequence_goes_on_in_the_middle(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the power is gone"):
        sitting(tmp_path, SubsetRandomSampler(range(20)), until=7)
    rest = sitting(tmp_path, SubsetRandomSampler(range(20)), resume=tmp_path)
    assert 0 < len(rest) <= 6
    assert sitting(tmp_path / "whole", SubsetRandomSampler(range(20)))[-len(rest) :] == rest


def test_a_sequence_that_cannot_be_drawn_again_does_not_go_on_in_the_middle(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the power is gone"):
        sitting(tmp_path, lambda epoch: range(20), until=7)
    with pytest.raises(outrider.ConfigError, match="<lambda> drew another sequence than before the checkpoint"):
        sitting(tmp_path, lambda epoch: range(19, -1, -1), resume=tmp_path)


TWO_RANKS = """
import json, os, sys
from pathlib import Path
import torch, outrider
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

numbers = TensorDataset(torch.arange(60).float().reshape(60, 1))

class Buckets(Sampler):
    def __iter__(self):
        for start in range(0, 60, 5):
            yield list(range(start, start + (2 if start % 2 else 5)))

class Unseeded(Sampler):
    "Every rank draws another sequence."
    def __iter__(self):
        return iter(range(30) if os.environ["RANK"] == "0" else range(30, 60))

folder = Path(sys.argv[1])
loaders = {
    "weighted": DataLoader(numbers, 4, sampler=WeightedRandomSampler([1.0] * 10 + [0.0] * 50, 90)),
    "batches": DataLoader(numbers, batch_sampler=Buckets()),
    "unseeded": DataLoader(numbers, 4, sampler=Unseeded()),
}
told = {}
for name, loader in loaders.items():
    for policy in ("sync", "cadence"):
        model = nn.Linear(1, 1)
        with outrider.Session(policy=policy, run_dir=folder / f"{name}-{policy}", threads_per_rank=1) as s:
            s.prepare(model, torch.optim.SGD(model.parameters(), 1e-6))
            got = []
            for (batch,) in s.batches(loader):
                got.append([int(x) for x in batch] if s._run.loop.samples else [])
                s.step(model(batch).square().mean())
            told[f"{name}-{policy}"] = got
try:
    with outrider.Session(policy="balanced", run_dir=folder / "balanced") as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), 1e-6))
        next(iter(s.batches(loaders["batches"])))
except outrider.ConfigError as error:
    told["error"] = str(error)
(folder / f"told{s.rank}.json").write_text(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    (folder / "script.py").write_text(TWO_RANKS)
    variables = {**os.environ, "OUTRIDER_DEVICES": "cpu,cpu@0.5", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "script.py", str(folder)]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"told{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_two_ranks_share_a_sequence(told: list[dict[str, Any]], policy: str) -> None:
    weighted = Counter(flat(told[0][f"weighted-{policy}"]) + flat(told[1][f"weighted-{policy}"]))
    assert sum(weighted.values()) == 90
    assert set(weighted) <= set(range(10))
    unseeded = flat(told[0][f"unseeded-{policy}"]) + flat(told[1][f"unseeded-{policy}"])
    assert sorted(unseeded) == list(range(30)), "the sequence of rank 0 is that of both"


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_two_ranks_share_whole_batches(told: list[dict[str, Any]], policy: str) -> None:
    batches = [batch for rank in told for batch in rank[f"batches-{policy}"] if batch]
    assert sorted(map(tuple, batches)) == [
        tuple(range(start, start + (2 if start % 2 else 5))) for start in range(0, 60, 5)
    ]
    assert all(rank[f"batches-{policy}"] for rank in told)


def test_a_policy_that_divides_batches_refuses_whole_ones(told: list[dict[str, Any]]) -> None:
    assert [rank["error"] for rank in told] == [
        "Buckets makes batches that are handed out whole, and policy 'balanced' divides each batch among the ranks\n"
        "hint: choose another policy: sync, cadence, async"
    ] * 2
