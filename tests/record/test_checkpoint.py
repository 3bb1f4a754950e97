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
from outrider.record import checkpoint
from outrider.record import checkpoint_files as files
from outrider.record.checkpoint import Progress
from outrider.record.run_folder import RunFolder

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
    part = write(folder, progress, {"steps": progress.epoch})
    return checkpoint.commit(folder, progress, [part], nonce="1", keep=None)


def write(folder: RunFolder, progress: Progress, state: dict[str, Any], *, rank: int = 0) -> checkpoint.Part:
    copied = checkpoint.copied(progress, rank=rank, device="cpu", model=MODEL, rank_state=state)
    return checkpoint.write_part(folder, copied, nonce="1")


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = take(RunFolder(tmp_path))
    assert checkpoint.load_progress(path, identity={"seed": 3}) == START
    assert checkpoint.load_rank(path, 0) == {"steps": 1}


def test_the_only_planner_of_an_older_checkpoint_belongs_to_the_batch_size_of_its_run(tmp_path: Path) -> None:
    path = take(RunFolder(tmp_path), planner={"paces": [1.5], "anchor": 4}, identity={"batch_size": 8})
    assert checkpoint.load_progress(path, identity={}).planner == {"8": {"paces": [1.5], "anchor": 4}}


def test_a_checkpoint_from_before_the_policy_auto_is_read(tmp_path: Path) -> None:
    path = take(RunFolder(tmp_path))
    content = files.read_state(path)
    del content["chooser"]
    (path / "state.json").write_text(json.dumps(content | {"digest": files._digest_of(content)}))
    assert checkpoint.load_progress(path, identity={"seed": 3}).chooser is None


def test_a_copy_does_not_change_when_the_run_goes_on(tmp_path: Path) -> None:
    history, plan = [{"epoch": 0}], {"anchor": 4}
    progress = dataclasses.replace(START, epochs=history, planner=plan)
    copied = checkpoint.copied(progress, rank=0, device="cpu", model=MODEL, rank_state={})
    history.append({"epoch": 1})
    plan["anchor"] = 8
    assert copied.progress == START


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    paths = [take(RunFolder(tmp_path), epoch=epoch, position=position) for epoch, position in [(9, 5), (10, 0), (9, 9)]]
    assert files.find(tmp_path)[0] == paths[1]


def test_all_but_the_newest_checkpoint_can_be_removed(tmp_path: Path) -> None:
    files.keep_newest(tmp_path, 1)
    paths = [take(RunFolder(tmp_path), epoch=epoch) for epoch in (9, 10)]
    files.keep_newest(tmp_path, 1)
    assert [path.exists() for path in paths] == [False, True]


def test_a_checkpoint_stands_for_itself(tmp_path: Path) -> None:
    path = take(RunFolder(tmp_path))
    take(RunFolder(tmp_path), epoch=2)
    assert files.find(path) == [path]


def test_a_checkpoint_that_was_not_finished_is_not_found(tmp_path: Path) -> None:
    write(RunFolder(tmp_path), START, {})
    with pytest.raises(DataError, match=r"^no checkpoint found in "):
        files.find(tmp_path)


def test_a_checkpoint_taken_again_replaces_the_first(tmp_path: Path) -> None:
    take(RunFolder(tmp_path), windows=1)
    path = take(RunFolder(tmp_path), windows=2)
    assert checkpoint.load_progress(path, identity={}).windows == 2


def test_a_rank_that_was_not_there_starts_from_rank_0(tmp_path: Path) -> None:
    assert checkpoint.load_rank(take(RunFolder(tmp_path)), 5) == {"steps": 1, "random": None}


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    path = take(RunFolder(tmp_path))
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "schema_version": 99}))
    with pytest.raises(DataError) as caught:
        checkpoint.load_progress(path, identity={})
    assert str(caught.value) == (
        f"{path} has schema_version 99, this Outrider reads 2\nhint: resume with the version that wrote it"
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
    staging = tmp_path / "checkpoints" / ".epoch00001-000000000000.1"
    staging.mkdir(parents=True)
    (staging / f".rank0.pt.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"rank0\.pt: no space left on device\nhint: free some space there"):
        write(RunFolder(tmp_path), START, {"steps": torch.zeros(9_999)})


# What counts as whole


def damage(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_without_one_of_its_files_is_not_found(tmp_path: Path) -> None:
    older, newer = (take(RunFolder(tmp_path), epoch=epoch) for epoch in (1, 2))
    (newer / "rank0.pt").unlink()
    assert files.find(tmp_path) == [older]


def test_a_checkpoint_with_a_file_that_was_cut_short_is_not_found(tmp_path: Path) -> None:
    older, newer = (take(RunFolder(tmp_path), epoch=epoch) for epoch in (1, 2))
    os.truncate(newer / "model.safetensors", 9)
    assert files.find(tmp_path) == [older]


@pytest.mark.parametrize("name", ["rank0.pt", "model.safetensors"])
def test_a_flipped_bit_is_noticed(tmp_path: Path, name: str) -> None:
    path = take(RunFolder(tmp_path))
    files.verify(path, [name])
    damage(path / name)
    with pytest.raises(DataError) as caught:
        files.verify(path, [name])
    assert caught.value.message == f"{path}/{name} is not as it was written: checksum differs"


def test_a_changed_state_is_noticed(tmp_path: Path) -> None:
    path = take(RunFolder(tmp_path))
    state = (path / "state.json").read_text()
    (path / "state.json").write_text(state.replace('"windows":7', '"windows":8'))
    with pytest.raises(DataError) as caught:
        checkpoint.load_progress(path, identity={})
    assert caught.value.message == f"{path}/state.json is not as it was written: checksum differs"


def test_files_of_a_rank_that_is_no_longer_there_are_not_taken_along(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    parts = [write(folder, START, {"steps": 1}, rank=rank) for rank in (0, 1)]
    checkpoint.commit(folder, START, parts, nonce="1", keep=None)
    path = take(folder)
    assert sorted(one.name for one in path.iterdir()) == ["model.safetensors", "rank0.pt", "state.json"]
    assert [one.name for one in folder.checkpoints.iterdir()] == [path.name]


def test_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for epoch in range(1, 5):
        progress = dataclasses.replace(START, epoch=epoch)
        checkpoint.commit(folder, progress, [write(folder, progress, {})], nonce="1", keep=2)
    assert [path.name[:10] for path in files.whole(tmp_path)] == ["epoch00004", "epoch00003"]
    assert len(list(folder.checkpoints.iterdir())) == 2


def test_what_a_dead_run_had_begun_is_removed_and_whole_checkpoints_stay(tmp_path: Path) -> None:
    path = take(RunFolder(tmp_path))
    write(RunFolder(tmp_path), dataclasses.replace(START, epoch=2), {})
    files.remove_stale(RunFolder(tmp_path).checkpoints)
    assert list(RunFolder(tmp_path).checkpoints.iterdir()) == [path]


def test_a_rank_whose_folder_is_on_a_disk_of_its_own_is_noticed(tmp_path: Path) -> None:
    folder, elsewhere = RunFolder(tmp_path / "here"), RunFolder(tmp_path / "other host")
    parts = [write(folder, START, {}), write(elsewhere, START, {}, rank=1)]
    assert checkpoint.unseen_ranks(folder, START, parts, nonce="1") == [1]
    assert checkpoint.unseen_ranks(folder, START, parts[:1], nonce="1") == []


def test_a_run_cannot_go_on_from_an_older_checkpoint_in_the_same_folder(tmp_path: Path) -> None:
    older, newer = (take(RunFolder(tmp_path), epoch=epoch) for epoch in (1, 2))
    checkpoint.refuse_strangers(RunFolder(tmp_path), resume=newer)
    with pytest.raises(ConfigError) as caught:
        checkpoint.refuse_strangers(RunFolder(tmp_path), resume=older)
    assert str(caught.value) == (
        f"{tmp_path} holds a later checkpoint than {older.name}: {newer.name}\n"
        f'hint: pass another run_dir to go on from this one, or resume="{tmp_path}" for the newest'
    )
