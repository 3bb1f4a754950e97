"""The run folder: names and formats of its files, each written completely or not at all.

A full disk or a read-only folder raises an error that names the file. Called by all modules that write files of a run.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from outrider import faults
from outrider.errors import ConfigError, DataError
from outrider.timeline.timeline_files import finite

SCHEMA_VERSION = 1
_MARKED = ("config.json", "record.json")
_OUR_KEYS = frozenset({"schema_version", "options"})
TORCH_ENDINGS = (".pt", ".pth")
SAFETENSORS_ENDING = ".safetensors"
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
        """Write compact JSON; values without a JSON form become strings, infinities and NaN become null."""
        text = json.dumps(finite(content), separators=(",", ":"), default=str, allow_nan=False)
        write_text(self.path / name, text + "\n")

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of this folder; None if it does not exist."""
        path = self.path / name
        if not path.is_file():
            return None
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content

    def refuse_foreign_files(self) -> None:
        """Raise if a run would replace foreign files of the same name, such as a saved model."""
        if any(self._is_ours(name) for name in _MARKED):
            return
        foreign = [name for name in (*_MARKED, self.model_file.name) if (self.path / name).exists()]
        if foreign:
            raise ConfigError(
                f"{self.path} has a {' and a '.join(foreign)} that no run wrote, and a run there would replace "
                f"{'it' if len(foreign) == 1 else 'them'}",
                hint="pass run_dir=a folder of its own",
            )

    def _is_ours(self, name: str) -> bool:
        try:
            content = self.read_json(name)
        except (OSError, ValueError):
            return False
        return isinstance(content, dict) and not _OUR_KEYS.isdisjoint(content)

    def write_model(self, state: Mapping[str, torch.Tensor]) -> None:
        save_model(self.path / "model.safetensors", state)

    @property
    def model_file(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


def check_ending(path: Path) -> None:
    """Raise if the ending of a model file's name does not tell the format."""
    if path.suffix not in (SAFETENSORS_ENDING, *TORCH_ENDINGS):
        ending = f"the ending {path.suffix!r}" if path.suffix else "no ending"
        raise ConfigError(
            f"the format of a model file follows its ending, and {str(path)!r} has {ending}",
            hint="use .safetensors, or .pt for torch.save of the state dict",
        )


def save_model(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write a model's state dict in the format of the file's ending: torch.save for .pt and .pth, else safetensors."""
    # Parameters are views of one flat arena and may be tied: the file gets plain copies.
    plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
    make_folder(path.parent)
    if path.suffix in TORCH_ENDINGS:
        write_whole(path, lambda temporary: _save_by_torch(plain, temporary))
    else:
        write_whole(path, lambda temporary: save_file(plain, temporary, metadata={"format": "pt"}))


def _save_by_torch(state: Mapping[str, torch.Tensor], path: Path) -> None:
    # Through a Python file object: torch's own writer does not report that a disk is full.
    with path.open("wb") as file:
        torch.save(state, file)


def load_model(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise DataError(f"no model file at {path}", hint="pass the folder of a run that ended, or its checkpoint")
    return load_file(path)


def load_into(model: nn.Module, path: Path) -> None:
    """Load the parameters and buffers of a model file into a model."""
    try:
        model.load_state_dict(load_model(path))
    except RuntimeError as error:
        raise DataError(
            f"{path} does not fit the model: {error}",
            hint="pass a model made the same way as the one that was trained",
        ) from error


def new_folder(parent: Path, name: str) -> Path:
    """Create a new folder `name`, `name-2` and so on; safe if several programs do so at once."""
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


def new_run_dir(policy: str) -> Path:
    """Create a new folder for a session without run_dir."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return new_folder(Path.cwd() / "runs", f"{stamp}-{policy}")


def shown_path(path: Path) -> Path:
    """A path as shown in messages: relative if it is inside the working folder."""
    try:
        return path.relative_to(Path.cwd())
    except (ValueError, OSError):
        return path


def make_folder(path: Path) -> None:
    with _guarded(path):
        path.mkdir(parents=True, exist_ok=True)


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def append(path: Path, data: bytes) -> None:
    """Append to a file."""
    with _guarded(path), path.open("ab") as file:
        file.write(data)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a temporary name, sync, then rename, so that readers see a complete old or new file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _guarded(path):
            write(temporary)
            faults.wrote(path)
            _sync(temporary)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk, if the file system supports it."""
    with suppress(OSError):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _guarded(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        number = _errno_of(error)
        if number is None:
            raise
        raise _cannot_write(path, number) from error


def _cannot_write(path: Path, number: int) -> DataError:
    hint = _HINTS.get(number, "pass run_dir=another_folder")
    return DataError(f"cannot write {path}: {os.strerror(number).lower()}", hint=hint)


def _errno_of(error: BaseException | None) -> int | None:
    """The system's reason for a failed write, which torch.save and safetensors hide in their own errors."""
    if error is None:
        return None
    if isinstance(error, OSError):
        return error.errno
    return errno.ENOSPC if "No space left" in str(error) else _errno_of(error.__context__)
