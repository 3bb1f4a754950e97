"""What a session tells about the user's loop: its length, the metrics of an epoch, the record, and model files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import outrider

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 42
OpenSession = Callable[..., outrider.Session]


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_DEVICES", raising=False)


@pytest.fixture
def session(tmp_path: Path) -> OpenSession:
    return lambda **options: outrider.Session(devices="cpu", run_dir=tmp_path, **options)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(3, 1)


def data(size: int = SIZE) -> TensorDataset:
    inputs = torch.randn(size, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def squared_error(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def options_in(record: Path, *names: str) -> dict[str, Any]:
    options = json.loads(record.read_text())["options"]
    return {name: options.get(name) for name in names}


# The length of a pass


def test_the_length_of_a_pass_is_its_samples_by_the_batch_size(session: OpenSession, model: nn.Module) -> None:
    with session() as s:
        s.prepare(model, sgd(model))
        batches = s.batches(data(), batch_size=8)
        assert len(batches) == 6
        assert len(list(batches)) == 6
        assert len(s.batches(data(), batch_size=8, drop_last=True)) == 5


def test_the_length_is_known_before_prepare_so_that_a_schedule_can_use_it(
    session: OpenSession, model: nn.Module
) -> None:
    optimizer = sgd(model)
    with session() as s:
        total = 2 * len(s.batches(data(), batch_size=8))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=total)
        s.prepare(model, optimizer, schedule)
        for _ in s.epochs(2):
            for batch in s.batches(data(), batch_size=8):
                s.step(squared_error(model, batch))
        assert s.global_step == 10
        assert total == 12


def test_the_length_of_the_last_pass_of_a_number_of_steps_is_that_of_the_cut(
    session: OpenSession, model: nn.Module
) -> None:
    lengths = []
    with session() as s:
        s.prepare(model, sgd(model))
        for _ in s.epochs(steps=8):
            batches = s.batches(data(40), batch_size=8)
            lengths.append(len(batches))
            for batch in batches:
                s.step(squared_error(model, batch))
    assert lengths == [5, 3]


# The metrics of an epoch


def test_metrics_in_the_body_of_an_epoch_are_those_of_that_epoch(session: OpenSession, model: nn.Module) -> None:
    seen = []
    with session() as s:
        s.prepare(model, sgd(model))
        for epoch in s.epochs(2):
            for batch in s.batches(data(), batch_size=8):
                s.step(squared_error(model, batch))
                s.log("epoch", float(epoch))
            told = s.metrics
            assert told is not None
            seen.append((told.epoch, told.samples, told.logged["epoch"], told.eval))
            reached = s.evaluate(squared_error, data())
            assert s.metrics is not None
            assert s.metrics.eval == reached
    assert seen == [(0, SIZE, 0.0, None), (1, SIZE, 1.0, None)]


def test_metrics_after_the_second_pass_of_an_epoch_have_both(session: OpenSession, model: nn.Module) -> None:
    seen = []
    with session() as s:
        s.prepare(model, sgd(model))
        for _ in s.epochs(1):
            for size in (20, 12):
                for batch in s.batches(data(size), batch_size=4):
                    s.step(squared_error(model, batch))
                assert s.metrics is not None
                seen.append(s.metrics.samples)
    assert seen == [20, 32]
    assert s.metrics is not None
    assert s.metrics.samples == 32


# The record


def test_the_record_has_the_batch_size_and_the_epochs_of_the_loop(
    session: OpenSession, model: nn.Module, tmp_path: Path
) -> None:
    with session() as s:
        s.prepare(model, sgd(model))
        for _ in s.epochs(3):
            for batch in s.batches(data(), batch_size=8):
                s.step(squared_error(model, batch))
    assert options_in(tmp_path / "record.json", "batch_size", "epochs") == {"batch_size": 8, "epochs": 3}
    assert options_in(tmp_path / "config.json", "batch_size", "epochs") == {"batch_size": 8, "epochs": 3}


def test_the_record_of_passes_without_epochs_counts_them_and_lists_their_batch_sizes(
    session: OpenSession, model: nn.Module, tmp_path: Path
) -> None:
    with session() as s:
        s.prepare(model, sgd(model))
        for size in (4, 8, 4):
            for batch in s.batches(data(), batch_size=size):
                s.step(squared_error(model, batch))
    assert options_in(tmp_path / "record.json", "batch_size", "epochs") == {"batch_size": [4, 8], "epochs": 3}


def test_the_record_of_a_number_of_steps_has_that_number(
    session: OpenSession, model: nn.Module, tmp_path: Path
) -> None:
    with session() as s:
        s.prepare(model, sgd(model))
        for _ in s.epochs(steps=7):
            for batch in s.batches(data(40), batch_size=8):
                s.step(squared_error(model, batch))
    expected = {"batch_size": 8, "epochs": None, "steps": 7}
    assert options_in(tmp_path / "record.json", *expected) == expected


# Model files


@pytest.mark.parametrize("name", ["m.pt", "m.pth", "m.safetensors"])
def test_a_model_file_has_the_format_of_its_ending(
    session: OpenSession, model: nn.Module, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    with session() as s:
        s.prepare(model, sgd(model))
        s.save(path)
    loaded = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert {key: value.tolist() for key, value in loaded.items()} == {
        key: value.tolist() for key, value in model.state_dict().items()
    }
    # Parameters are views of one arena; the file must not hold all of it once per parameter.
    assert path.stat().st_size < 10_000


@pytest.mark.parametrize(("name", "told"), [("m.bin", "the ending '.bin'"), ("model", "no ending")])
def test_a_model_file_of_another_ending_is_refused(
    session: OpenSession, model: nn.Module, name: str, told: str
) -> None:
    with session() as s:
        s.prepare(model, sgd(model))
        with pytest.raises(outrider.ConfigError) as caught:
            s.save(name)
    assert str(caught.value) == (
        f"the format of a model file follows its ending, and {name!r} has {told}\n"
        "hint: use .safetensors, or .pt for torch.save of the state dict"
    )


def test_losses_of_a_step_that_a_pass_leaves_unfinished_do_not_count(session: OpenSession, model: nn.Module) -> None:
    with session(policy="sync") as s:
        s.prepare(model, sgd(model))
        for _ in s.epochs(2):
            whole: list[float] = []
            # Five batches of eight: the last one begins a step that is not taken.
            for number, batch in enumerate(s.batches(data(40), batch_size=8)):
                loss = squared_error(model, batch)
                s.backward(loss / 2)
                whole.append(loss.item())
                if number % 2:
                    s.optimizer_step()
        last = s.metrics
    assert last is not None
    assert last.loss == pytest.approx(sum(whole[:4]) / 4)


def test_the_loss_of_an_accumulated_step_counts_in_full_across_a_checkpoint(
    session: OpenSession, model: nn.Module
) -> None:
    with session(policy="sync", checkpoint_every="0.001s") as s:
        s.prepare(model, sgd(model))
        for _ in s.epochs(1):
            for number, batch in enumerate(s.batches(data(400), batch_size=4)):
                # Four quarters of a loss of 1 make one step.
                s.backward(model(batch[0]).sum() * 0 + 0.25)
                if number % 4 == 3:
                    s.optimizer_step()
        last = s.metrics
    assert last is not None
    assert last.loss == pytest.approx(1.0)
