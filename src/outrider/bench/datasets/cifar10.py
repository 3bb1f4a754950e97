"""CIFAR-10 (Krizhevsky 2009) from its official binary files, its augmentation on the device, and its stand-in.

Decides how files become tensors, how images are cropped, flipped and normalised, and how shapes are drawn where no real
data is at hand. Called by `source` and by the models of CIFAR.
"""

from __future__ import annotations

import math
import tarfile
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Generator, Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from outrider.bench.datasets.dataset_files import Part, check, md5, not_official, read_checked, uniform
from outrider.data.keyed import below
from outrider.data.order import mix
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


def read_part(folder: Path, part: Part) -> TensorDataset:
    """50,000 training or 10,000 test images as uint8 [N, 3, 32, 32], labels as int64; see `normalised`.

    The folder holds the six files, or their archive.
    """
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


PADDING = 4
# Of the training images, per channel, in 0 to 1.
MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)
_DOWN, _RIGHT, _FLIP = 0, 1, 2  # streams of random numbers


def crop_and_flip(batch: Sequence[Tensor], keys: Tensor) -> tuple[Tensor, ...]:
    """Pad images by 4 black pixels, cut their old size out anywhere, mirror every other one; labels stay."""
    images, *others = batch
    down = below(keys, _DOWN, 2 * PADDING + 1)
    right = below(keys, _RIGHT, 2 * PADDING + 1)
    is_mirrored = below(keys, _FLIP, 2).bool()
    return (cropped(images, down=down, right=right, is_mirrored=is_mirrored), *others)


def cropped(images: Tensor, *, down: Tensor, right: Tensor, is_mirrored: Tensor) -> Tensor:
    """Images [N, C, H, W] of the same size cut from the padded ones at (`down`, `right`), each from 0 to 8."""
    num_images, channels, height, width = images.shape
    padded = functional.pad(images, (PADDING,) * 4)
    rows = torch.arange(height, device=images.device) + down[:, None]
    columns = torch.arange(width, device=images.device)
    columns = torch.where(is_mirrored[:, None], width - 1 - columns, columns) + right[:, None]
    pixels = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
    index = pixels.view(num_images, 1, -1).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, index).view_as(images)


def normalised(images: Tensor) -> Tensor:
    """Images of bytes [N, 3, H, W] as float32 with mean 0 and deviation 1 per channel over the training set."""
    scale, offset = _scale_and_offset(images.device)
    return torch.addcmul(offset, images.float(), scale)


@cache  # made at every step, they would be copied to the device every time
def _scale_and_offset(device: torch.device) -> tuple[Tensor, Tensor]:
    mean, deviation = torch.tensor([MEAN, DEVIATION]).view(2, 3, 1, 1)
    return (1 / (255 * deviation)).to(device), (-mean / deviation).to(device)


STAND_IN_NAME = "coloured shapes (stand-in)"
SIDE = 32
NUM_CLASSES = 10
_NUM_FIGURES = 5
_CHUNK = 250  # keeps the distances of one chunk in the cache
_NOISE = 0.06
_STRIPES = 9.0  # radians per unit of the figure's size


def draw_part(part: Part, num_images: int, seed: int = 0) -> TensorDataset:
    """Images as uint8 [N, 3, 32, 32], labels as int64; the same for the same seed."""
    generator = torch.Generator().manual_seed(mix(seed, 2 if part == "train" else 3))
    labels = torch.randint(NUM_CLASSES, (num_images,), generator=generator)
    images = torch.empty(num_images, 3, SIDE, SIDE, dtype=torch.uint8)
    for start in range(0, num_images, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        images[chunk] = _draw(labels[chunk], generator)
    return TensorDataset(images, labels)


def _draw(labels: Tensor, generator: Generator) -> Tensor:
    num_images = len(labels)
    size = uniform((num_images, 1, 1), 0.4, 0.75, generator)
    x, y = _own_axes(num_images, size, generator)
    distance = _distances(x, y)[labels % _NUM_FIGURES, torch.arange(num_images)] * size
    inside = torch.sigmoid(-distance * SIDE)[:, None]
    striped = (labels >= _NUM_FIGURES)[:, None, None] & (torch.sin(_STRIPES * x) > 0)
    ground = torch.rand(num_images, 3, 1, 1, generator=generator)
    # At least a third away from the ground in every channel, so that the figure is seen.
    figure = (ground + uniform((num_images, 3, 1, 1), 0.33, 0.67, generator)) % 1.0
    ink = torch.where(striped[:, None], ground, figure)
    noise = _NOISE * torch.randn(num_images, 3, SIDE, SIDE, generator=generator)
    return torch.lerp(ground.expand_as(ink), ink, inside).add_(noise).clamp_(0, 1).mul_(255).round_().to(torch.uint8)


def _own_axes(num_images: int, size: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Every pixel's place [N, 32, 32] as the figure sees it: shifted, turned, in units of its size."""
    axis = (torch.arange(SIDE) + 0.5) * (2 / SIDE) - 1
    angle = uniform((num_images, 1, 1), -0.5, 0.5, generator)
    shift = uniform((2, num_images, 1, 1), -0.25, 0.25, generator)
    x, y = axis[None, None, :] - shift[0], axis[None, :, None] - shift[1]
    return (x * angle.cos() + y * angle.sin()) / size, (y * angle.cos() - x * angle.sin()) / size


def _distances(x: Tensor, y: Tensor) -> Tensor:
    """How far outside of each figure every pixel lies [5, N, 32, 32]; negative inside."""
    across, along, radius = x.abs(), y.abs(), torch.hypot(x, y)
    disc = radius - 1.0
    ring = (radius - 0.75).abs() - 0.25
    square = torch.maximum(across, along) - 0.85
    triangle = torch.maximum(y - 0.6, across * math.cos(math.pi / 6) - y * math.sin(math.pi / 6) - 0.6)
    bar = torch.maximum(across - 0.3, along - 1.0)
    cross = torch.minimum(bar, torch.maximum(along - 0.3, across - 1.0))
    return torch.stack([disc, ring, square, triangle, cross])
