"""Checkpoints of real runs: killed while one is written, damaged afterwards, with state that torch cannot read."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import outrider
from outrider.record import checkpoint_files

Trainer = Callable[..., outrider.Run]

SCRIPT = """
import torch
from torch import nn
import outrider

inputs = torch.randn(96, 4)
outrider.train(
    model=lambda: nn.Linear(4, 1),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    step=lambda model, batch: model(batch).square().mean(),
    dataset=inputs,
    batch_size=8,
    epochs=3,
    checkpoint_every=1,
    devices="cpu",
    run_dir="run",
).join()
"""


def stop_after_epoch_1(context: outrider.EpochContext) -> None:
    if context.epoch == 1:
        context.stop()


def same(left: outrider.Trained, right: outrider.Trained) -> bool:
    a, b = left.state_dict, right.state_dict
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before_whole(tmp_path: Path) -> None:
    # Rank 0 writes three files for each: it dies with the second file of the second.
    killed = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "OUTRIDER_FAULTS": "rank=0,at=checkpoint-write,n=5,do=kill"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert killed.returncode == 1, killed.stderr
    [newest] = checkpoint_files.find(tmp_path / "run")
    assert newest.name == "epoch00001-000000000000"
    checkpoint_files.verify(newest, ["rank0.pt", "model.safetensors"])
    assert len(list(newest.parent.iterdir())) == 2


@pytest.mark.parametrize("name", ["rank0.pt", "model.safetensors"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(
    train_here: Trainer, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    train_here(epochs=2, checkpoint_every=1, run_dir=tmp_path / "cut").join()
    older, newer = (tmp_path / "cut" / "checkpoints" / f"epoch0000{number}-000000000000" for number in (1, 2))
    flip_a_bit(newer / name)
    resumed = train_here(epochs=3, resume=tmp_path / "cut", run_dir=tmp_path / "resumed").join()
    assert [epoch.epoch for epoch in resumed.epochs] == [1, 2]
    assert capfd.readouterr().err == (
        f"outrider: the newest checkpoint is damaged, {older.name} is used instead: "
        f"{newer}/{name} is not as it was written: checksum differs\n"
    )
    assert newer.is_dir()


def test_a_damaged_checkpoint_of_the_run_itself_is_set_aside(train_here: Trainer, tmp_path: Path) -> None:
    train_here(epochs=2, checkpoint_every=1).join()
    checkpoints = tmp_path / "run" / "checkpoints"
    flip_a_bit(checkpoints / "epoch00002-000000000000" / "rank0.pt")
    train_here(epochs=3, checkpoint_every=1, resume=tmp_path / "run").join()
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "damaged-epoch00002-000000000000",
        "epoch00002-000000000000",
        "epoch00003-000000000000",
    ]


def test_a_run_without_one_whole_checkpoint_says_what_is_wrong_with_the_newest(
    train_here: Trainer, tmp_path: Path
) -> None:
    train_here(epochs=1, checkpoint_every=1, run_dir=tmp_path / "cut").join()
    file = tmp_path / "cut" / "checkpoints" / "epoch00001-000000000000" / "rank0.pt"
    flip_a_bit(file)
    with pytest.raises(outrider.DataError) as caught:
        train_here(epochs=2, resume=tmp_path / "cut").join()
    assert str(caught.value) == (
        f"{file} is not as it was written: checksum differs\nhint: it is damaged: resume from another checkpoint"
    )


# State that is not plain


class Table(lr_scheduler.LRScheduler):
    """A schedule of the user's own, with what people keep in one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.table = np.linspace(1.0, 0.1, 40)
        self.seen: dict[Any, Any] = {np.int64(1): [np.float32(0.5)]}
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [rate * self.table[min(self.last_epoch, 39)] for rate in self.base_lrs]


class Secretive(Table):
    """One that keeps what cannot be saved."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.curve = lambda tick: 1.0
        super().__init__(optimizer)


def adam_with_a_numpy_rate(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=np.float64(0.01), betas=(np.float64(0.9), 0.99))


def test_numbers_and_arrays_of_numpy_are_saved_and_resumed_to_the_bit(train_here: Trainer, tmp_path: Path) -> None:
    options = {"optimizer": adam_with_a_numpy_rate, "scheduler": Table, "epochs": 4}
    whole = train_here(**options, run_dir=tmp_path / "whole").join()
    train_here(**options, run_dir=tmp_path / "cut", epoch_end=stop_after_epoch_1).join()
    resumed = train_here(**options, resume=tmp_path / "cut", run_dir=tmp_path / "resumed").join()
    assert same(whole, resumed)


def test_a_schedule_that_cannot_be_saved_is_an_error_before_the_first_step(train_here: Trainer) -> None:
    with pytest.raises(outrider.ConfigError) as caught:
        train_here(scheduler=Secretive, checkpoint_every=1).join()
    assert caught.value.message == "scheduler['curve'] is a function, which a checkpoint cannot hold"


def test_a_run_that_takes_no_checkpoints_may_have_such_a_schedule(
    train_here: Trainer, capfd: pytest.CaptureFixture[str]
) -> None:
    trained = train_here(scheduler=Secretive, epochs=3, epoch_end=stop_after_epoch_1).join()
    assert len(trained.epochs) == 2
    assert capfd.readouterr().err == (
        "outrider: no checkpoint epoch00002-000000000000, there is none yet; "
        "rank 0: scheduler['curve'] is a function, which a checkpoint cannot hold\n"
    )


# Random numbers


class DrawsFromAll(nn.Module):
    """A model whose output hangs on all generators of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        noise = random.random() + float(np.random.random()) + float(torch.rand(()))
        output: torch.Tensor = self.linear(inputs) + 0.01 * noise
        return output


def test_random_numbers_of_python_and_numpy_go_on_too(train_here: Trainer, tmp_path: Path) -> None:
    options = {"model": DrawsFromAll, "epochs": 4}
    whole = train_here(**options, run_dir=tmp_path / "whole").join()
    train_here(**options, run_dir=tmp_path / "cut", epoch_end=stop_after_epoch_1).join()
    random.seed(99)
    np.random.seed(99)
    resumed = train_here(**options, resume=tmp_path / "cut", run_dir=tmp_path / "resumed").join()
    assert same(whole, resumed)
