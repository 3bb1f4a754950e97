"""The run folder: what a run leaves behind, each file written whole or not at all.

Decides names and formats; a full disk or a folder that cannot be written is an error that names the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider.errors import DataError

SCHEMA_VERSION = 1


class RunFolder:
    """`runs/<name>/`; rank 0 writes, anyone may read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        _guarded(self.path, lambda: self.path.mkdir(parents=True, exist_ok=True))

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Compact JSON; anything without a JSON form is written as its name, infinities and NaN as null."""
        text = json.dumps(_plain(content), separators=(",", ":"), default=str, allow_nan=False)
        write_whole(self.path / name, lambda temporary: _write_text(temporary, text + "\n"))

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
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(
            f"cannot write {path}: {reason}", hint="free some space there, or pass run_dir=another_folder"
        ) from error
    except Exception as error:
        # safetensors reports a failed write as an error of its own.
        if "No space left" not in str(error) and "I/O error" not in str(error):
            raise
        raise DataError(
            f"cannot write {path}: no space left on device",
            hint="free some space there, or pass run_dir=another_folder",
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
