"""The augmentation hook: keys by (seed, epoch, sample) whoever takes the sample, in feeds, real runs and the lab."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import outrider
from outrider.data.feed import make_feed
from outrider.data.keyed import uniform
from outrider.data.order import in_order, sample_seed, shuffled
from outrider.errors import ConfigError, DataError
from outrider.policy.effects import Batch, Lease
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench
from outrider.virtual.lab import train as train_in_lab

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = torch.arange(40)


class Squares:
    """Read sample by sample."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


def with_keys(batch: Any, keys: Tensor) -> tuple[Any, Tensor]:
    return batch, keys


def key_by_sample(dataset: Any, order: Tensor, *, epoch: int = 0, seed: int = 0, batch_size: int = 7) -> dict[int, int]:
    feed = make_feed(dataset, device="cpu", seed=seed, augment=with_keys)
    feed.start_epoch(order, epoch)
    pairs = [feed.fetch(batch) for batch in Lease(0, feed.num_samples).batches(batch_size)]
    return {sample: key for rows, keys in pairs for sample, key in zip(rows.tolist(), keys.tolist(), strict=True)}


@given(order_seed=st.integers(0, 2**32), batch_size=st.integers(1, 40))
def test_a_sample_has_the_same_key_wherever_it_comes(order_seed: int, batch_size: int) -> None:
    order = shuffled(40, seed=order_seed, epoch=0)
    assert key_by_sample(ROWS, order, batch_size=batch_size) == key_by_sample(ROWS, in_order(40))


def test_the_key_is_the_seed_of_the_sample() -> None:
    keys = key_by_sample(ROWS, in_order(40), epoch=2, seed=5)
    assert keys[3] % 2**64 == sample_seed(5, 2, 3)


def test_the_next_epoch_has_other_keys() -> None:
    first, second = key_by_sample(ROWS, in_order(40)), key_by_sample(ROWS, in_order(40), epoch=1)
    assert not set(first.values()) & set(second.values())


def test_a_data_set_read_sample_by_sample_gets_the_same_keys_as_tensors() -> None:
    assert key_by_sample(Squares(), in_order(40)) == key_by_sample(ROWS, in_order(40))


def test_the_reason_says_that_batches_are_augmented() -> None:
    feed = make_feed(ROWS, device="cpu", seed=0, augment=with_keys)
    assert feed.reason == "tensors of 320 bytes in host memory, taken by index; augmented on cpu"


def broken(batch: Any, keys: Tensor) -> Any:
    raise ValueError("no such pixel")


def test_a_failing_augmentation_names_the_samples() -> None:
    feed = make_feed(ROWS, device="cpu", seed=0, augment=broken)
    feed.start_epoch(in_order(40), 0)
    with pytest.raises(DataError) as caught:
        feed.fetch(Batch(4, 2))
    assert caught.value.message == "augment failed on samples 4, 5: ValueError: no such pixel"
    assert caught.value.hint == (
        "it is called as augment(batch, keys) with the batch on the device and one int64 key per sample"
    )


def test_an_augmentation_that_is_no_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        outrider.train(make_model, make_optimizer, step, data(), batch_size=8, run_dir=tmp_path, augment=3)  # type: ignore[arg-type]
    assert str(caught.value) == "augment must be a function, got int\nhint: pass augment=a_function, not its result"


# Real ranks and the lab.


def data() -> TensorDataset:
    inputs = torch.randn(163, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def step(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def scaled(batch: tuple[Tensor, ...], keys: Tensor) -> tuple[Tensor, ...]:
    inputs, labels = batch
    return inputs * (0.5 + uniform(keys, 0))[:, None], labels


def inputs_mean(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return batch[0].mean()


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("augmented")
    outrider.train(
        make_model,
        make_optimizer,
        step,
        data(),
        run_dir=folder,
        batch_size=8,
        epochs=2,
        policy="cadence",
        devices="cpu,cpu@0.5",
        anchor=2,
        threads_per_rank=1,
        record_schedule=True,
        augment=scaled,
        evaluate=inputs_mean,
        eval_dataset=data(),
    ).join()
    return folder


def replayed(folder: Path, **changes: Any) -> dict[str, Tensor]:
    segments = json.loads((folder / "schedule.json").read_text())["segments"]
    learning = {"optimizer": make_optimizer, "batch_size": 8, "epochs": 2, "policy": "cadence"}
    recipe = Recipe(model=make_model, step=step, dataset=data(), **learning, **changes)
    return train_in_lab(recipe, Bench(speeds=(1.0, 1.0)), schedule=segments).state_dict()


def test_the_lab_augments_as_the_ranks_do_bit_for_bit(real_run: Path) -> None:
    trained, again = load_file(real_run / "model.safetensors"), replayed(real_run, augment=scaled)
    assert {name: torch.equal(tensor, again[name]) for name, tensor in trained.items()} == dict.fromkeys(trained, True)


def test_the_augmentation_changes_what_is_learned(real_run: Path) -> None:
    trained, plain = load_file(real_run / "model.safetensors"), replayed(real_run)
    assert not torch.equal(trained["0.weight"], plain["0.weight"])


def test_evaluation_is_not_augmented(real_run: Path) -> None:
    record = json.loads((real_run / "record.json").read_text())
    assert record["epochs"][-1]["eval"] == pytest.approx(data().tensors[0].mean().item(), rel=1e-5)


def test_the_configuration_names_the_augmentation(real_run: Path) -> None:
    assert json.loads((real_run / "config.json").read_text())["objects"]["augment"] == "scaled"
