"""Every argument of a DataLoader is taken over or refused; none is ignored."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

import outrider
from outrider.api.loaders import ARGUMENTS, as_source
from outrider.data.order import shuffled
from outrider.errors import ConfigError

NUMBERS = TensorDataset(torch.arange(20).float().reshape(20, 1))


class Numbers(Dataset[torch.Tensor]):
    """Read sample by sample, so that workers have something to do."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(os.environ.get("OUTRIDER_TEST_WORKER", -1))])


def mark_worker(worker: int) -> None:
    os.environ["OUTRIDER_TEST_WORKER"] = str(worker)


def batches_of(folder: Path, data: Any, **options: Any) -> list[torch.Tensor]:
    """One pass on one rank."""
    model = nn.Linear(1, 1)
    with outrider.Session(devices="cpu", run_dir=folder) as session:
        session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        return [batch[0] if isinstance(batch, list | tuple) else batch for batch in session.batches(data, **options)]


def samples_of(batches: list[torch.Tensor]) -> list[int]:
    return [int(number) for batch in batches for number in batch[:, 0]]


def test_every_argument_of_torch_has_an_answer() -> None:
    arguments = set(inspect.signature(DataLoader.__init__).parameters) - {"self"}
    assert arguments <= set(ARGUMENTS), "torch has a new argument: take it over or refuse it in outrider.api.loaders"


def test_drop_last_leaves_the_remainder_out(tmp_path: Path) -> None:
    got = batches_of(tmp_path, DataLoader(NUMBERS, batch_size=8, shuffle=True, drop_last=True))
    assert [len(batch) for batch in got] == [8, 8]
    assert samples_of(got) == shuffled(20, seed=0, epoch=0)[:16].tolist()


def test_drop_last_is_an_option_of_batches_too(tmp_path: Path) -> None:
    got = batches_of(tmp_path, NUMBERS, batch_size=8, shuffle=False, drop_last=True)
    assert samples_of(got) == list(range(16))


def test_drop_last_that_leaves_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(outrider.DataError, match=r"^drop_last=True leaves nothing of 20 samples: a step of all ranks"):
        batches_of(tmp_path, NUMBERS, batch_size=32, drop_last=True)


@pytest.mark.parametrize("place", ["loader", "sampler"])
def test_a_generator_decides_the_order(tmp_path: Path, place: str) -> None:
    generator = torch.Generator().manual_seed(7)
    if place == "loader":
        loader = DataLoader(NUMBERS, batch_size=8, shuffle=True, generator=generator)
    else:
        loader = DataLoader(NUMBERS, batch_size=8, sampler=RandomSampler(NUMBERS, generator=generator))
    assert samples_of(batches_of(tmp_path, loader)) == shuffled(20, seed=7, epoch=0).tolist()


def test_workers_run_as_the_loader_says(tmp_path: Path) -> None:
    loader = DataLoader(
        Numbers(),
        batch_size=5,
        num_workers=2,
        worker_init_fn=mark_worker,
        prefetch_factor=3,
        persistent_workers=True,
        multiprocessing_context="fork",
        timeout=100,
        pin_memory=False,
    )
    got = batches_of(tmp_path, loader)
    assert samples_of(got) == list(range(20))
    assert {int(worker) for batch in got for worker in batch[:, 1]} <= {0, 1}


def test_the_settings_of_workers_reach_the_feed() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Numbers(), batch_size=5, num_workers=2, prefetch_factor=3, timeout=7, generator=generator)
    loading = as_source(loader, batch_size=None).loading
    assert (loading.prefetch_factor, loading.timeout_s, loading.seed) == (3, 7, 3)


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(19, -1, -1))


class Shouting(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


WAY_OUT = "hint: pass the data set and batch_size=; every sample then goes to one of the ranks"
DECIDERS = {
    "no batches": (DataLoader(NUMBERS, batch_size=None), "batch_size=None"),
    "loader": (Shouting(NUMBERS, 4), "an __iter__ of its own (Shouting)"),
}


@pytest.mark.parametrize(("loader", "decider"), DECIDERS.values(), ids=DECIDERS.keys())
def test_an_order_of_its_own_is_refused(loader: Any, decider: str) -> None:
    with pytest.raises(ConfigError) as caught:
        as_source(loader, batch_size=None)
    assert str(caught.value) == f"a DataLoader with {decider} decides itself which samples come when\n{WAY_OUT}"


def test_a_distributed_sampler_is_refused_with_its_own_way_out() -> None:
    sampler = DistributedSampler(NUMBERS, num_replicas=2, rank=0)
    with pytest.raises(ConfigError) as caught:
        as_source(DataLoader(NUMBERS, 4, sampler=sampler), batch_size=None)
    assert str(caught.value) == (
        "a DataLoader with DistributedSampler decides itself which samples come when\n"
        "hint: leave the sampler out: outrider hands out the samples, each to one of the ranks"
    )


def test_batches_out_of_order_are_refused() -> None:
    loader = DataLoader(NUMBERS, 4, num_workers=1, in_order=False)
    with pytest.raises(ConfigError, match=r"^a DataLoader with in_order=False: the policy decides"):
        as_source(loader, batch_size=None)


def test_an_evaluation_uses_the_batch_size_of_its_loader(tmp_path: Path) -> None:
    sizes = []
    model = nn.Linear(1, 1)

    def count(model: nn.Module, batch: Any) -> float:
        sizes.append(len(batch[0]))
        return 0.0

    with outrider.Session(devices="cpu", run_dir=tmp_path) as session:
        session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        session.evaluate(count, DataLoader(NUMBERS, batch_size=8, drop_last=True))
    assert sizes == [8, 8]
