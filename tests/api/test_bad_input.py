"""What users get wrong: each a clear error with a hint, word for word, and nothing is left behind."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outrider

Trainer = Callable[..., outrider.Run]
Problem = dict[str, Any]


def error_of(start: Callable[[], outrider.Run]) -> outrider.OutriderError:
    """What train() or join() raises."""
    with pytest.raises(outrider.OutriderError) as caught:
        start().join()
    return caught.value


def words_of(start: Callable[[], outrider.Run]) -> str:
    return str(error_of(start))


# Devices, backends, ports, and what cannot be sent


def test_a_device_that_does_not_exist(train_two: Trainer, tmp_path: Path) -> None:
    words = words_of(lambda: train_two(devices="gpu", run_dir=tmp_path / "run"))
    assert words == "unknown device kind 'gpu'\nhint: did you mean cuda? kinds are cuda, cpu, xpu, mps"
    assert not (tmp_path / "run").exists()


def test_a_cuda_device_that_is_not_there(train_two: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert words_of(lambda: train_two(devices="cuda:7,cpu", run_dir=tmp_path / "run")) == (
        '1 CUDA device asked for, 0 found (by NVML)\nhint: run `outrider diagnose`, or pass devices="cpu,cpu"'
    )
    assert not (tmp_path / "run").exists()


def test_nccl_without_cuda(train_two: Trainer, tmp_path: Path) -> None:
    assert words_of(lambda: train_two(backend="nccl", run_dir=tmp_path / "run")) == (
        "backend nccl cannot be used: rank 0 is on cpu, and nccl joins CUDA devices only\n"
        'hint: leave backend out, or pass backend="cpu"'
    )
    assert not (tmp_path / "run").exists()


def test_a_port_in_use(train_two: Trainer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = words_of(lambda: train_two(port=port, run_dir=tmp_path / "run"))
    assert words == f"port {port} on 127.0.0.1 is in use\nhint: leave port out and a free one is taken"
    assert not (tmp_path / "run").exists()


def test_an_object_that_cannot_be_sent_is_named(train_two: Trainer, problem: Problem, tmp_path: Path) -> None:
    lock = threading.Lock()

    def step(model: nn.Module, batch: Any) -> Any:
        with lock:
            return problem["step"](model, batch)

    assert words_of(lambda: train_two(step=step, run_dir=tmp_path / "run")) == (
        "step cannot be sent to the ranks: cannot pickle '_thread.lock' object\n"
        "hint: pass a function that makes it, or open files and locks inside the rank"
    )
    assert not (tmp_path / "run").exists()


# Data


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_an_empty_data_set(train_two: Trainer, tmp_path: Path) -> None:
    assert words_of(lambda: train_two(dataset=torch.zeros(0, 4), run_dir=tmp_path / "run")) == (
        "the data set is empty\nhint: it needs at least one sample; check its path, split or filter"
    )
    assert not (tmp_path / "run").exists()


def test_an_empty_data_set_made_in_the_rank(train_here: Trainer) -> None:
    assert words_of(lambda: train_here(dataset=list)) == (
        "the data set is empty\nhint: it needs at least one sample; check its path, split or filter"
    )


def test_a_data_set_smaller_than_the_world(train_two: Trainer, tmp_path: Path) -> None:
    assert words_of(lambda: train_two(dataset=torch.zeros(1, 4), run_dir=tmp_path / "run")) == (
        "the data set has 1 sample for 2 ranks\nhint: use fewer devices, or a larger data set"
    )
    assert not (tmp_path / "run").exists()


def test_a_data_set_without_positions(train_here: Trainer) -> None:
    assert words_of(lambda: train_here(dataset=Stream())) == (
        "Stream is an iterable data set without a length, so nobody knows when an epoch ends\n"
        "hint: pass length=, the number of its samples in an epoch, such as length=10_000"
    )
    assert words_of(lambda: train_here(dataset=lambda: Stream())) == (
        "Stream is an iterable-style data set: its samples have no positions to hand out\n"
        "hint: pass length=, the number of its samples in an epoch, or use a map-style data set with __getitem__ and "
        "__len__"
    )


class Broken(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 11:
            raise OSError("no such picture")
        return torch.zeros(4)


def test_a_sample_that_cannot_be_read(train_here: Trainer) -> None:
    error = error_of(lambda: train_here(dataset=Broken(), shuffle=False, step=sum_of_outputs))
    assert isinstance(error, outrider.DataError)
    assert error.message == "sample 11 could not be read: OSError: no such picture"
    assert (error.rank, error.step) == (0, 1)


def sum_of_outputs(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).sum()


# The user's functions


def nan_at_step_5(model: nn.Module, batch: Any) -> Any:
    model.num_calls = getattr(model, "num_calls", 0) + 1  # type: ignore[assignment]
    return model(batch[0]).mean() * (float("nan") if model.num_calls == 6 else 1.0)


def test_a_loss_that_is_not_finite(train_here: Trainer) -> None:
    error = error_of(lambda: train_here(step=nan_at_step_5))
    assert isinstance(error, outrider.StepError)
    assert str(error) == (
        "rank 0 (cpu), step 5: the loss is not finite\nhint: lower the learning rate, or set max_grad_norm"
    )
    assert (error.rank, error.step) == (0, 5)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (
            lambda model, batch: 0.5,
            "rank 0 (cpu), step 0: the step function must return a scalar loss, got float\n"
            "hint: return the mean loss of the batch, a tensor with one element",
        ),
        (
            lambda model, batch: model(batch[0]),
            "rank 0 (cpu), step 0: the step function must return a scalar loss, got a tensor of shape (8, 1)\n"
            "hint: return the mean loss of the batch, a tensor with one element",
        ),
        (
            lambda model, batch: model(batch[0]).mean().detach(),
            "rank 0 (cpu), step 0: the loss that the step function returned has no gradient\n"
            "hint: return the loss itself, computed from the model's output, without detach() or no_grad()",
        ),
    ],
    ids=["a number", "one loss per sample", "no gradient"],
)
def test_a_step_that_returns_no_scalar_loss(train_here: Trainer, step: Any, words: str) -> None:
    assert words_of(lambda: train_here(step=step)) == words


def fail(*_: Any) -> Any:
    raise KeyError("label")


def test_an_exception_in_the_step(train_here: Trainer) -> None:
    error = error_of(lambda: train_here(step=fail))
    assert isinstance(error, outrider.StepError)
    assert str(error) == "rank 0 (cpu), step 0: KeyError: 'label'"
    assert isinstance(error.__cause__, KeyError)


def test_an_exception_in_evaluate(train_here: Trainer, problem: Problem) -> None:
    error = error_of(lambda: train_here(evaluate=fail, eval_dataset=problem["dataset"]))
    assert str(error) == "rank 0 (cpu), step 12 in evaluate: KeyError: 'label'"
    assert isinstance(error.__cause__, KeyError)


def test_an_evaluation_that_is_no_number(train_here: Trainer, problem: Problem) -> None:
    words = words_of(lambda: train_here(evaluate=lambda m, b: m(b[0]), eval_dataset=problem["dataset"]))
    assert words == (
        "rank 0 (cpu), step 12: evaluate must return a number, got a tensor of shape (96, 1)\n"
        "hint: return the mean over the batch"
    )


@pytest.mark.parametrize(("name", "step"), [("epoch_start", 0), ("epoch_end", 12)])
def test_an_exception_in_a_callback(train_here: Trainer, name: str, step: int) -> None:
    error = error_of(lambda: train_here(**{name: fail}))
    assert str(error) == f"rank 0 (cpu), step {step} in {name}: KeyError: 'label'"
    assert (error.rank, error.step) == (0, step)


def test_an_exception_where_the_model_is_made(train_here: Trainer) -> None:
    error = error_of(lambda: train_here(model=fail))
    assert isinstance(error, outrider.StepError)
    assert str(error) == "rank 0 (cpu): KeyError: 'label'"


class BrokenOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise KeyError("label")


def test_an_exception_in_the_optimizer(train_here: Trainer) -> None:
    words = words_of(lambda: train_here(optimizer=BrokenOptimizer))
    assert words == "rank 0 (cpu), step 0 in the optimizer: KeyError: 'label'"


def test_an_exception_in_the_scheduler(train_here: Trainer) -> None:
    def too_short(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)

    words = words_of(lambda: train_here(scheduler=too_short, epochs=3))
    assert re.match(r"rank 0 \(cpu\), step \d in the scheduler, tick 3: ValueError: Tried to step 3 times", words), (
        words
    )


def test_an_optimizer_that_computes_gradients_by_itself(train_here: Trainer) -> None:
    assert words_of(lambda: train_here(optimizer=torch.optim.LBFGS)) == (
        "LBFGS computes several gradients in each of its steps, and ranks average one\n"
        "hint: use an optimizer of one gradient per step, such as SGD, Adam or AdamW"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"model": nn.Tanh()},
            "the model has no parameters to train\nhint: pass a model with at least one nn.Parameter",
        ),
        (
            {"model": lambda: "resnet"},
            "model must be a torch.nn.Module or a function that makes one, got str\n"
            "hint: pass model=make_model where make_model() returns an nn.Module",
        ),
        (
            {"optimizer": lambda parameters: None},
            "optimizer must make a torch.optim.Optimizer, got NoneType\n"
            "hint: pass optimizer=lambda p: torch.optim.Adam(p, 1e-3)",
        ),
        (
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
            "scheduler must make a learning-rate schedule that advances by steps, got ReduceLROnPlateau\n"
            "hint: pass scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, num_steps)",
        ),
    ],
    ids=["no parameters", "no module", "no optimizer", "no schedule"],
)
def test_factories_that_make_the_wrong_thing(train_here: Trainer, options: Problem, words: str) -> None:
    assert words_of(lambda: train_here(**options)) == words


def test_a_batch_that_cannot_be_cut(train_here: Trainer) -> None:
    words = words_of(lambda: train_here(dataset=[{1}] * 8, collate=set_of_samples, accumulate=2))
    assert words == (
        "a batch of 8 samples cannot be cut into micro-batches: it has a value of type set\n"
        "hint: return tensors, tuples, lists or dicts with one row or item per sample from collate; where that is "
        "impossible, use a smaller batch_size, and leave out accumulate and micro_batch"
    )


def set_of_samples(samples: list[Any]) -> Any:
    return {1, 2}


# The run folder


def test_a_run_folder_that_is_a_file(train_two: Trainer, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    assert words_of(lambda: train_two(run_dir=tmp_path / "taken" / "run")) == (
        f"cannot write {tmp_path}/taken/run: not a directory\nhint: a file is in the way: pass run_dir=another_folder"
    )


def test_a_run_folder_that_cannot_be_written(train_two: Trainer) -> None:
    # Nobody may create a folder there, not even the administrator.
    assert words_of(lambda: train_two(run_dir="/proc/run")) == (
        "cannot write /proc/run: no such file or directory\nhint: pass run_dir=another_folder"
    )


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system with room for two small files."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "outrider-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def wide_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8_192), nn.Tanh(), nn.Linear(8_192, 1))


TOO_SMALL = (
    r"{} has \d\S* \w+ free, the model alone needs 197 kB\nhint: free some space there, or pass run_dir=another_folder"
)
"""What is left depends on how many files a run has begun."""


def test_a_disk_too_small_for_the_model_is_told_before_training(train_here: Trainer, tiny_disk: Path) -> None:
    error = error_of(lambda: train_here(model=wide_model, lr_scale=1e-6, run_dir=tiny_disk))
    assert isinstance(error, outrider.DataError)
    assert re.fullmatch(TOO_SMALL.format(re.escape(str(tiny_disk))), str(error))
    assert not list(tiny_disk.glob(".*"))


def test_a_disk_too_small_for_checkpoints_and_the_model_is_told_too(train_here: Trainer, tiny_disk: Path) -> None:
    words = words_of(lambda: train_here(model=wide_model, lr_scale=1e-6, run_dir=tiny_disk, checkpoint_every=1))
    assert re.fullmatch(TOO_SMALL.format(re.escape(str(tiny_disk))), words)


def test_a_full_disk_at_the_start(train_two: Trainer, tiny_disk: Path) -> None:
    (tiny_disk / "filling").write_bytes(bytes(16_384))
    words = words_of(lambda: train_two(run_dir=tiny_disk))
    assert words == (
        f"cannot write {tiny_disk}/config.json: no space left on device\n"
        "hint: free some space there, or pass run_dir=another_folder"
    )
