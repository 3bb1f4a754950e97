"""Checkpoints as files: whole or invisible, newest first, refused where they are not of the same run."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import ConfigError, DataError
from outrider.runtime import checkpoint
from outrider.runtime.checkpoint import Progress
from outrider.runtime.folder import RunFolder

MODEL = {"weight": torch.arange(3.0)}
START = Progress(
    epoch=1,
    position=0,
    windows=7,
    train_s=2.5,
    planner={"anchor": 4},
    splitter={},
    epochs=[{"epoch": 0}],
    identity={"seed": 3},
)


def take(folder: RunFolder, **changes: Any) -> Path:
    progress = dataclasses.replace(START, **changes)
    checkpoint.save(folder, progress, rank=0, model=MODEL, rank_state={"steps": progress.epoch})
    return checkpoint.commit(folder, progress)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = take(RunFolder(tmp_path))
    assert checkpoint.load_progress(path, identity={"seed": 3}) == START
    assert checkpoint.load_rank(path, 0) == {"steps": 1}


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    paths = [take(RunFolder(tmp_path), epoch=epoch, position=position) for epoch, position in [(9, 5), (10, 0), (9, 9)]]
    assert checkpoint.find(tmp_path) == paths[1]


def test_all_but_the_newest_checkpoint_can_be_removed(tmp_path: Path) -> None:
    checkpoint.keep_newest(tmp_path)
    paths = [take(RunFolder(tmp_path), epoch=epoch) for epoch in (9, 10)]
    checkpoint.keep_newest(tmp_path)
    assert [path.exists() for path in paths] == [False, True]


def test_a_checkpoint_stands_for_itself(tmp_path: Path) -> None:
    path = take(RunFolder(tmp_path))
    take(RunFolder(tmp_path), epoch=2)
    assert checkpoint.find(path) == path


def test_a_checkpoint_that_was_not_finished_is_not_found(tmp_path: Path) -> None:
    checkpoint.save(RunFolder(tmp_path), START, rank=0, model=MODEL, rank_state={})
    with pytest.raises(DataError, match=r"^no checkpoint found in "):
        checkpoint.find(tmp_path)


def test_a_checkpoint_taken_again_replaces_the_first(tmp_path: Path) -> None:
    take(RunFolder(tmp_path), windows=1)
    path = take(RunFolder(tmp_path), windows=2)
    assert checkpoint.load_progress(path, identity={}).windows == 2


def test_a_rank_that_was_not_there_starts_from_rank_0(tmp_path: Path) -> None:
    assert checkpoint.load_rank(take(RunFolder(tmp_path)), 5) == {"steps": 1}


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    path = take(RunFolder(tmp_path))
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "schema_version": 99}))
    with pytest.raises(DataError) as caught:
        checkpoint.load_progress(path, identity={})
    assert str(caught.value) == (
        f"{path} has schema_version 99, this Outrider reads 1\nhint: resume with the version that wrote it"
    )


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        checkpoint.load_progress(take(RunFolder(tmp_path)), identity={"seed": 4})
    assert str(caught.value) == "cannot resume: seed was 3, now 4\nhint: pass the same seed, or start a new run"


def test_a_rank_state_that_runs_code_is_not_loaded(tmp_path: Path) -> None:
    path = take(RunFolder(tmp_path))
    torch.save({"steps": os.getcwd}, path / "rank0.pt")
    with pytest.raises(DataError) as caught:
        checkpoint.load_rank(path, 0)
    assert str(caught.value) == (
        f"{path}/rank0.pt cannot be read: UnpicklingError\n"
        "hint: it is damaged, or holds code, which is never loaded: resume from another checkpoint"
    )


@pytest.mark.parametrize("resume", ["", "checkpoints/epoch00001-000000000000"])
def test_a_run_that_goes_on_may_add_to_its_own_checkpoints(tmp_path: Path, resume: str) -> None:
    take(RunFolder(tmp_path))
    checkpoint.refuse_strangers(RunFolder(tmp_path), resume=tmp_path / resume)


def test_a_run_that_goes_on_from_elsewhere_is_a_stranger(tmp_path: Path) -> None:
    take(RunFolder(tmp_path / "here"))
    with pytest.raises(ConfigError, match=r"here holds the checkpoints of another run"):
        checkpoint.refuse_strangers(RunFolder(tmp_path / "here"), resume=tmp_path / "there")


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    staging = tmp_path / "checkpoints" / ".epoch00001-000000000000"
    staging.mkdir(parents=True)
    (staging / f".rank0.pt.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"rank0\.pt: no space left on device\nhint: free some space there"):
        checkpoint.save(RunFolder(tmp_path), START, rank=0, model=MODEL, rank_state={"steps": torch.zeros(9_999)})
