"""The data sets of the suite, and the places of their files on this machine.

Decides where files are searched; each file is checked by its MD5 whenever it is read. Called by the modules of the data
sets, which parse the files, and by `source`.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.utils.data import TensorDataset

from outrider.errors import DataError, unknown_name

Part = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DataPair:
    """Training and test set; a stand-in is never held against a published figure."""

    name: str
    train: TensorDataset
    test: TensorDataset
    is_stand_in: bool


def read_checked(path: Path, expected_md5: str) -> bytes:
    """The whole content of a file that must have this MD5."""
    content = path.read_bytes()
    check(content, expected_md5, name=str(path))
    return content


def check(content: bytes, expected_md5: str, *, name: str) -> None:
    if md5(content) != expected_md5:
        raise not_official(name, expected_md5, md5(content))


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def not_official(name: str, expected_md5: str, found_md5: str) -> DataError:
    return DataError(
        f"{name} is not the official file: expected MD5 {expected_md5}, found {found_md5}",
        hint="the download may be cut short; fetch the file again",
    )


def uniform(shape: int | tuple[int, ...], low: float, high: float, generator: Generator) -> Tensor:
    """Random numbers for the stand-ins."""
    return torch.rand(shape, generator=generator) * (high - low) + low


# Files by which the folder of a data set is known; any one of them will do.
_MARKERS = {
    "mnist": ("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte"),
    "cifar10": ("data_batch_1.bin", "cifar-10-binary.tar.gz"),
    "shakespeare": ("input.txt",),
}
# The folder that an archive unpacks to.
_UNPACKED = {"cifar10": "cifar-10-batches-bin"}


def find_data(name: str, directory: str | Path | None = None) -> Path | None:
    """The folder that holds the data set's files, or None; each place may be that folder or the one above it."""
    if name not in _MARKERS:
        raise unknown_name("data set", name, _MARKERS)
    for place in _places(directory):
        for folder in _folders(place, name):
            if any((folder / marker).is_file() for marker in _MARKERS[name]):
                return folder
    return None


def cache_directory() -> Path:
    """Where this user's downloads belong on this platform."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "outrider"


def _places(directory: str | Path | None) -> Iterator[Path]:
    if directory is not None:
        yield Path(directory).expanduser()
    if named := os.environ.get("OUTRIDER_DATA"):
        yield Path(named).expanduser()
    yield cache_directory()


def _folders(place: Path, name: str) -> Iterator[Path]:
    for folder in (place / name, place):
        if name in _UNPACKED:
            yield folder / _UNPACKED[name]
        yield folder
