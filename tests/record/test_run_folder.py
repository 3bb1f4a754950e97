"""Files of a run: written whole or not at all, and what is told when they cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.errors import DataError
from outrider.record.run_folder import RunFolder, load_into, load_model, new_folder, save_model, write_whole

FULL = "free some space there, or pass run_dir=another_folder"


def test_json_is_read_back_as_it_was(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_json("record.json", {"epochs": (1, 2), "loss": 0.5})
    assert folder.read_json("record.json") == {"epochs": [1, 2], "loss": 0.5}


def test_numbers_that_json_does_not_know_are_null(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_json("record.json", {"loss": [float("nan"), float("inf"), -float("inf")]})
    assert json.loads((tmp_path / "record.json").read_text()) == {"loss": [None, None, None]}


def test_a_file_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).read_json("record.json") is None


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("old")

    def write_half(path: Path) -> None:
        path.write_text("ne")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match=r"^interrupted$"):
        write_whole(tmp_path / "record.json", write_half)
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
    assert (tmp_path / "record.json").read_text() == "old"


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    # Everything written there meets a device without any room.
    (tmp_path / f".record.json.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(DataError) as caught:
        RunFolder(tmp_path).write_json("record.json", {"schema_version": 1})
    assert str(caught.value) == f"cannot write {tmp_path}/record.json: no space left on device\nhint: {FULL}"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_by_torchs_format_too(tmp_path: Path) -> None:
    (tmp_path / f".model.pt.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(DataError) as caught:
        save_model(tmp_path / "model.pt", {"weight": torch.ones(100_000)})
    assert str(caught.value) == f"cannot write {tmp_path}/model.pt: no space left on device\nhint: {FULL}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_the_folder_of_a_model_is_made(tmp_path: Path, name: str) -> None:
    save_model(tmp_path / "a" / "b" / name, {"weight": torch.ones(2)})
    assert (tmp_path / "a" / "b" / name).is_file()


def test_a_folder_of_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    assert [new_folder(tmp_path / "runs", "a").name for _ in range(3)] == ["a", "a-2", "a-3"]


def test_a_new_folder_that_cannot_be_made_is_an_error() -> None:
    with pytest.raises(DataError, match=r"^cannot write /proc/runs: no such file or directory\nhint: "):
        new_folder(Path("/proc/runs"), "a")


def test_tied_weights_are_saved_under_both_names_and_load_again(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    save_model(tmp_path / "model.safetensors", model.state_dict())
    loaded = load_model(tmp_path / "model.safetensors")
    assert torch.equal(loaded["0.weight"], loaded["1.weight"])
    load_into(model, tmp_path / "model.safetensors")


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_model(tmp_path / "model.safetensors")
    assert str(caught.value) == (
        f"no model file at {tmp_path}/model.safetensors\nhint: pass the folder of a run that ended, or its checkpoint"
    )
