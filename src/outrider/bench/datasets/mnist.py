"""MNIST (LeCun et al. 1998) from its four official files.

Decides whether the files are the official ones (MD5) and what the tensors look like. Downloads nothing.
Called by the benchmarks with a folder from `find_data`.
"""

from __future__ import annotations

import gzip
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from outrider.bench.datasets.official import read_checked
from outrider.bench.datasets.pair import DataPair, Part
from outrider.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class _IdxFile:
    name: str
    md5: str
    md5_of_gz: str


_TRAIN_IMAGES = _IdxFile(
    name="train-images-idx3-ubyte",
    md5="6bbc9ace898e44ae57da46a324031adb",
    md5_of_gz="f68b3c2dcbeaaa9fbdd348bbdeb94873",
)
_TRAIN_LABELS = _IdxFile(
    name="train-labels-idx1-ubyte",
    md5="a25bea736e30d166cdddb491f175f624",
    md5_of_gz="d53e105ee54ea40749a09fcbcd1e9432",
)
_TEST_IMAGES = _IdxFile(
    name="t10k-images-idx3-ubyte",
    md5="2646ac647ad5339dbf082846283269ea",
    md5_of_gz="9fb629c4189551a2d022fa330f9573f3",
)
_TEST_LABELS = _IdxFile(
    name="t10k-labels-idx1-ubyte",
    md5="27ae3e4e09519cfbb04c329615203637",
    md5_of_gz="ec29112dd5afa0611ce80d1b7f02629c",
)


def mnist(directory: str | Path) -> DataPair:
    """60,000 training and 10,000 test images as float32 [N, 1, 28, 28] in 0 to 1, labels as int64."""
    folder = Path(directory).expanduser()
    return DataPair(
        name="MNIST",
        train=read_part(folder, "train"),
        test=read_part(folder, "test"),
        is_stand_in=False,
    )


def read_part(folder: Path, part: Part) -> TensorDataset:
    """One of the two sets alone."""
    images, labels = (_TRAIN_IMAGES, _TRAIN_LABELS) if part == "train" else (_TEST_IMAGES, _TEST_LABELS)
    pixels = parse_idx(_content(folder, images))
    return TensorDataset(pixels.float().div_(255).unsqueeze(1), parse_idx(_content(folder, labels)).long())


def _content(folder: Path, file: _IdxFile) -> bytes:
    """The uncompressed content of the .gz file, or of the plain one where that is there instead."""
    compressed, plain = folder / f"{file.name}.gz", folder / file.name
    if compressed.is_file():
        return gzip.decompress(read_checked(compressed, file.md5_of_gz))
    if plain.is_file():
        return read_checked(plain, file.md5)
    raise DataError(
        f"{compressed.name} is missing in {folder}",
        hint="name the folder with the four official IDX files of MNIST, compressed or not",
    )


def parse_idx(content: bytes) -> Tensor:
    """A tensor from the IDX format: two zero bytes, type 8 (uint8), dimensions, sizes (big-endian), values."""
    _, kind, num_dimensions = struct.unpack_from(">HBB", content)
    assert kind == 8, f"IDX type {kind}; only uint8 (8) is used by MNIST"
    sizes = struct.unpack_from(f">{num_dimensions}I", content, 4)
    # A copy, because torch tensors over read-only bytes are not safe to write to.
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * num_dimensions)
    assert len(values) == math.prod(sizes), f"{len(values)} values for sizes {sizes}"
    return values.view(sizes)
