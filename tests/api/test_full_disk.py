"""A disk that fills up costs a checkpoint or a record, never the trained model."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outrider
from outrider.record import checkpoint_files, disk_space

Trainer = Callable[..., outrider.Run]
FULL = "no space left on device"


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda text: monkeypatch.setenv("OUTRIDER_FAULTS", text)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretend that the disk has so many bytes left."""
    return lambda size: monkeypatch.setattr(disk_space, "free_bytes", lambda path: size)


def warnings(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [
        line
        for line in capfd.readouterr().err.splitlines()
        if line.startswith("outrider: ") and not line.startswith("outrider: fault on rank")
    ]


def test_a_checkpoint_that_does_not_fit_costs_a_line_and_not_the_run(
    train_here: Trainer, tmp_path: Path, fault: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    # The first checkpoint has three files: the second fails at its first.
    fault("rank=0,at=checkpoint-write,n=4,do=disk-full")
    trained = train_here(epochs=3, checkpoint_every=1).join()
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name[:10] for path in checkpoint_files.whole(trained.run_dir)] == ["epoch00003", "epoch00001"]
    assert len(list(checkpoints.iterdir())) == 2
    staging = "epoch00002-000000000000"
    [line] = warnings(capfd)
    assert line.startswith(
        f"outrider: no checkpoint {staging}, the newest is epoch00001-000000000000; "
        f"rank 0: cannot write {checkpoints}/.{staging}."
    )
    assert line.endswith(f"/rank0.pt: {FULL}")


def test_ranks_agree_on_the_next_checkpoint_though_the_disk_of_one_refused_the_first(
    train_two: Trainer, tmp_path: Path, fault: Any
) -> None:
    fault("rank=0,at=checkpoint-write,n=1,do=disk-full")
    trained = train_two(epochs=3, checkpoint_every=1, timeout_s=20, run_dir=tmp_path / "run").join()
    assert [path.name[:10] for path in checkpoint_files.whole(trained.run_dir)] == ["epoch00003", "epoch00002"]


def test_a_checkpoint_is_not_begun_where_there_is_no_room(
    train_here: Trainer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    left = iter([10**9, 10])
    monkeypatch.setattr(disk_space, "free_bytes", lambda path: next(left))
    trained = train_here(epochs=1, checkpoint_every=1).join()
    assert checkpoint_files.whole(trained.run_dir) == []
    [line] = warnings(capfd)
    assert line.startswith(
        "outrider: no checkpoint epoch00001-000000000000, there is none yet; "
        f"rank 0: {trained.run_dir} has 10 bytes free, the checkpoint needs "
    )


def test_a_disk_that_does_not_take_the_model_is_an_error_at_the_start(
    train_here: Trainer, tmp_path: Path, free: Any
) -> None:
    free(100)
    with pytest.raises(outrider.DataError) as caught:
        train_here(epochs=1).join()
    assert str(caught.value) == (
        f"{tmp_path}/run has 100 bytes free, the model alone needs 196 bytes\n"
        "hint: free some space there, or pass run_dir=another_folder"
    )


def test_a_disk_too_small_for_two_checkpoints_is_told_at_the_start(
    train_here: Trainer, tmp_path: Path, free: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    free(700)
    train_here(epochs=1, checkpoint_every=1).join()
    assert warnings(capfd)[0] == (
        f"outrider: {tmp_path}/run has 700 bytes free, two checkpoints need about 784 bytes: "
        "those that do not fit will be left out"
    )


def test_a_model_that_its_folder_does_not_take_is_kept_elsewhere(
    train_here: Trainer, tmp_path: Path, fault: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    fault("rank=0,at=model-write,do=disk-full")
    trained = train_here(epochs=1).join()
    assert trained.model_file.parent.parent == Path(disk_space.tempfile.gettempdir())
    assert sorted(trained.state_dict) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    trained.load_into(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    assert warnings(capfd) == [
        f"outrider: cannot write {tmp_path}/run/model.safetensors: {FULL}; "
        f"the trained model was written to {trained.model_file} instead"
    ]
    shutil.rmtree(trained.model_file.parent)


def test_a_starter_finds_the_model_that_its_ranks_kept_elsewhere(
    train_two: Trainer, tmp_path: Path, fault: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    fault("rank=0,at=model-write,do=disk-full")
    trained = train_two(epochs=1, run_dir=tmp_path / "run").join()
    assert trained.model_file.parent.parent == Path(disk_space.tempfile.gettempdir())
    assert torch.isfinite(trained.state_dict["0.weight"]).all()
    assert any(str(trained.model_file) in line for line in warnings(capfd))
    shutil.rmtree(trained.model_file.parent)


def test_a_record_that_cannot_be_written_does_not_end_the_run(
    train_here: Trainer, tmp_path: Path, fault: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    fault("rank=0,at=record-write,n=2,times=0,do=disk-full")
    trained = train_here(epochs=1).join()
    assert trained.model_file == tmp_path / "run" / "model.safetensors"
    line = f"outrider: record.json is not up to date: cannot write {tmp_path}/run/record.json: {FULL}"
    assert warnings(capfd) == [line]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for 256 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("a small file system can be mounted by root only")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_run_on_a_disk_that_is_really_full_ends_with_its_model(
    train_here: Trainer, small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fill_disk(context: outrider.EpochContext) -> None:
        if context.epoch == 1:
            with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1024))

    model = nn.Sequential(nn.Linear(4, 1_000), nn.Tanh(), nn.Linear(1_000, 1))
    options = {"model": model, "epochs": 3, "checkpoint_every": 1, "epoch_end": fill_disk, "max_grad_norm": 0.01}
    trained = train_here(**options, run_dir=small_disk / "run").join()
    assert trained.model_file.parent.parent == Path(disk_space.tempfile.gettempdir())
    assert trained.state_dict["0.weight"].shape == (1_000, 4)
    assert [path.name[:10] for path in checkpoint_files.whole(trained.run_dir)] == ["epoch00001"]
    assert not list((small_disk / "run" / "checkpoints").glob(".*"))
    assert any("the trained model was written to" in line for line in warnings(capfd))
    shutil.rmtree(trained.model_file.parent)
