"""CIFAR-10 (Krizhevsky 2009) from its official binary files, unpacked or in their archive.

Decides whether the files are the official ones (MD5) and what the tensors look like. Downloads nothing.
Called by the benchmarks with a folder from `find_data`.
"""

from __future__ import annotations

import tarfile
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from outrider.bench.datasets.official import check, md5, not_official, read_checked
from outrider.bench.datasets.pair import DataPair, Part
from outrider.errors import DataError

ARCHIVE = "cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
FOLDER = "cifar-10-batches-bin"
"""The folder inside the archive."""
MD5_BY_FILE = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}

_SHAPE = (3, 32, 32)
_RECORD_BYTES = 1 + 3 * 32 * 32  # label, then red, green and blue planes


def cifar10(directory: str | Path) -> DataPair:
    """50,000 training and 10,000 test images as uint8 [N, 3, 32, 32], labels as int64; see `augment.normalised`."""
    folder = Path(directory).expanduser()
    return DataPair(
        name="CIFAR-10", train=read_part(folder, "train"), test=read_part(folder, "test"), is_stand_in=False
    )


def read_part(folder: Path, part: Part) -> TensorDataset:
    """One of the two sets alone, from a folder with the six files or with their archive."""
    names = [name for name in MD5_BY_FILE if name.startswith("test") == (part == "test")]
    contents = [read_checked(folder / name, MD5_BY_FILE[name]) for name in names if (folder / name).is_file()]
    if len(contents) < len(names):
        contents = _from_archive(folder, names)
    images, labels = zip(*(parse_batch(content) for content in contents), strict=True)
    return TensorDataset(torch.cat(images), torch.cat(labels))


def parse_batch(content: bytes) -> tuple[Tensor, Tensor]:
    """Images and labels of one binary file: records of a label byte and three planes of 32 × 32."""
    assert len(content) % _RECORD_BYTES == 0, f"{len(content)} bytes are no whole number of records"
    # A copy, because torch tensors over read-only bytes are not safe to write to.
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, _RECORD_BYTES)
    return records[:, 1:].reshape(-1, *_SHAPE), records[:, 0].long()


def unpack(folder: Path) -> None:
    """Lay the archive's files beside it, so that later runs need not decompress it."""
    for name, content in zip(MD5_BY_FILE, _from_archive(folder, list(MD5_BY_FILE)), strict=True):
        (folder / name).write_bytes(content)


def _from_archive(folder: Path, names: list[str]) -> list[bytes]:
    path = folder / ARCHIVE
    if not path.is_file():
        missing = next(name for name in names if not (folder / name).is_file())
        raise DataError(
            f"{missing} is missing in {folder}",
            hint=f"name the folder with the six .bin files of CIFAR-10's binary version, or with {ARCHIVE}",
        )
    try:
        contents = _members(path, names)
    except (tarfile.TarError, EOFError, KeyError, OSError, zlib.error) as error:
        raise not_official(str(path), ARCHIVE_MD5, md5(path.read_bytes())) from error
    for name, content in zip(names, contents, strict=True):
        check(content, MD5_BY_FILE[name], name=f"{path}: {name}")
    return contents


def _members(path: Path, names: list[str]) -> list[bytes]:
    with tarfile.open(path) as archive:
        files = [archive.extractfile(f"{FOLDER}/{name}") for name in names]
        return [file.read() for file in files if file is not None]
