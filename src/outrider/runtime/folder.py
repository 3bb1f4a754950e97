"""The run folder: what a run leaves behind, each file written whole or not at all.

Decides names and formats; a full disk or a folder that cannot be written is an error that names the file.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from outrider.errors import DataError

SCHEMA_VERSION = 1
_HINTS = {
    errno.ENOSPC: "free some space there, or pass run_dir=another_folder",
    errno.EDQUOT: "free some space there, or pass run_dir=another_folder",
    errno.EACCES: "pass run_dir=a folder that you may write to",
    errno.EROFS: "pass run_dir=a folder that you may write to",
    errno.ENOTDIR: "a file is in the way: pass run_dir=another_folder",
    errno.EEXIST: "a file is in the way: pass run_dir=another_folder",
}


class RunFolder:
    """`runs/<name>/`; rank 0 writes, anyone may read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        make_folder(self.path)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Compact JSON; anything without a JSON form is written as its name, infinities and NaN as null."""
        text = json.dumps(_plain(content), separators=(",", ":"), default=str, allow_nan=False)
        write_text(self.path / name, text + "\n")

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A file of this folder; None where it is not there."""
        path = self.path / name
        if not path.is_file():
            return None
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content

    def write_model(self, state: Mapping[str, torch.Tensor]) -> None:
        save_model(self.path / "model.safetensors", state)

    @property
    def model_file(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


def save_model(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    # Parameters are views of one flat arena and may be tied: the file gets plain copies.
    plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
    write_whole(path, lambda temporary: save_file(plain, temporary, metadata={"format": "pt"}))


def load_model(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise DataError(f"no model file at {path}", hint="pass the folder of a run that ended, or its checkpoint")
    return load_file(path)


def load_into(model: nn.Module, path: Path) -> None:
    """Put the parameters and buffers of a model file into a model."""
    try:
        model.load_state_dict(load_model(path))
    except RuntimeError as error:
        raise DataError(
            f"{path} does not fit the model: {error}",
            hint="pass a model made the same way as the one that was trained",
        ) from error


def new_folder(parent: Path, name: str) -> Path:
    """A folder that was not there before, also where several programs ask at once: `name`, `name-2` and so on."""
    make_folder(parent)
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise _cannot_write(path, error.errno or 0) from error
        return path
    raise AssertionError("there is always another number")


def make_folder(path: Path) -> None:
    _guarded(path, lambda: path.mkdir(parents=True, exist_ok=True))


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda temporary: _write_text(temporary, text))


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Write beside the target, then move there: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _guarded(path, lambda: write(temporary))
        _guarded(path, lambda: os.replace(temporary, path))
    finally:
        temporary.unlink(missing_ok=True)


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)


def _guarded(path: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except Exception as error:
        number = _errno_of(error)
        if number is None:
            raise
        raise _cannot_write(path, number) from error


def _cannot_write(path: Path, number: int) -> DataError:
    hint = _HINTS.get(number, "pass run_dir=another_folder")
    return DataError(f"cannot write {path}: {os.strerror(number).lower()}", hint=hint)


def _errno_of(error: BaseException | None) -> int | None:
    """The system's reason: torch.save hides it behind an error of its own, safetensors puts it into words."""
    if error is None:
        return None
    if isinstance(error, OSError):
        return error.errno
    return errno.ENOSPC if "No space left" in str(error) else _errno_of(error.__context__)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
