"""MNIST (LeCun et al. 1998) from its four official files, and its stand-in: ten classes of drawn 28 × 28 images.

Decides how files become tensors, and how glyphs are drawn where no real data is at hand. Called by `source`.
"""

from __future__ import annotations

import gzip
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils.data import TensorDataset

from outrider.bench.datasets.dataset_files import DataPair, Part, read_checked, uniform
from outrider.data.order import mix
from outrider.errors import DataError


class IdxFile(NamedTuple):
    """An official file, and its MD5 as it is and compressed."""

    name: str
    md5: str
    md5_of_gz: str


FILES = tuple(
    IdxFile(*line.split())
    for line in """
    train-images-idx3-ubyte 6bbc9ace898e44ae57da46a324031adb f68b3c2dcbeaaa9fbdd348bbdeb94873
    train-labels-idx1-ubyte a25bea736e30d166cdddb491f175f624 d53e105ee54ea40749a09fcbcd1e9432
    t10k-images-idx3-ubyte  2646ac647ad5339dbf082846283269ea 9fb629c4189551a2d022fa330f9573f3
    t10k-labels-idx1-ubyte  27ae3e4e09519cfbb04c329615203637 ec29112dd5afa0611ce80d1b7f02629c
    """.strip().splitlines()
)
"""Images and labels for training, then for the test."""


def read_part(folder: Path, part: Part) -> TensorDataset:
    """60,000 training or 10,000 test images as float32 [N, 1, 28, 28] in 0 to 1, labels as int64."""
    images, labels = FILES[:2] if part == "train" else FILES[2:]
    pixels = parse_idx(_content(folder, images))
    return TensorDataset(pixels.float().div_(255).unsqueeze(1), parse_idx(_content(folder, labels)).long())


def _content(folder: Path, file: IdxFile) -> bytes:
    """The uncompressed content of the .gz file, or of the plain file if that exists instead."""
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


STAND_IN_NAME = "glyphs (stand-in)"
SIDE = 28
NUM_CLASSES = 10

# Corners of a figure eight, in units of half the image: x to the right, y down.
_CORNERS = torch.tensor([[-0.38, -0.66], [0.38, -0.66], [-0.38, 0.0], [0.38, 0.0], [-0.38, 0.66], [0.38, 0.66]])
_SEGMENTS = torch.tensor([[0, 1], [1, 3], [3, 5], [4, 5], [2, 4], [0, 2], [2, 3]])
# Every class has two signs, so that no single weighting of pixels can name it: a digit, or a letter.
_DIGITS = ("012345", "12", "01346", "01236", "1256", "02356", "023456", "012", "0123456", "012356")
_LETTERS = ("012456", "0345", "03456", "0456", "12456", "1234", "345", "01456", "12345", "246")
_NUM_STRAY = 2
_FAR_AWAY = 100.0
_CHUNK = 50  # keeps the distances of one chunk in the cache


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hand:
    """How unsteady the hand is, in units of half the image unless said."""

    letters: float = 0.5  # fraction of images
    shift: float = 0.08
    slant: float = 0.2
    scale_low: float = 0.85
    scale_high: float = 1.05
    wobble: float = 0.03
    width_low: float = 0.08
    width_high: float = 0.14
    stray_length: float = 0.25
    darkest: float = 0.5  # brightness, white is 1
    noise: float = 0.05  # standard deviation of the brightness


def glyphs(num_train: int = 12_000, num_test: int = 2_000, seed: int = 0) -> DataPair:
    """Images as float32 [N, 1, 28, 28] in 0 to 1, labels as int64; the same for the same seed."""
    return DataPair(
        name=STAND_IN_NAME,
        train=draw_part("train", num_train, seed),
        test=draw_part("test", num_test, seed),
        is_stand_in=True,
    )


def draw_part(part: Part, num_images: int, seed: int = 0) -> TensorDataset:
    """One of the two sets alone."""
    generator = torch.Generator().manual_seed(mix(seed, 0 if part == "train" else 1))
    labels = torch.randint(NUM_CLASSES, (num_images,), generator=generator)
    images = torch.empty(num_images, 1, SIDE, SIDE)
    for start in range(0, num_images, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        images[chunk] = _draw(labels[chunk], hand=_Hand(), generator=generator)
    return TensorDataset(images, labels)


def _draw(labels: Tensor, *, hand: _Hand, generator: Generator) -> Tensor:
    num_images = len(labels)
    strokes = torch.cat([_figure(labels, hand, generator), _stray(num_images, hand, generator)], dim=1)
    width = uniform(num_images, hand.width_low, hand.width_high, generator)[:, None]
    ink = torch.sigmoid((width - _distance(strokes)) * SIDE)
    grey = ink * uniform(num_images, hand.darkest, 1.0, generator)[:, None]
    return (
        grey.add_(torch.randn(grey.shape, generator=generator), alpha=hand.noise).clamp_(0, 1).view(-1, 1, SIDE, SIDE)
    )


def _figure(labels: Tensor, hand: _Hand, generator: Generator) -> Tensor:
    """Strokes of each label's figure [N, 7, 2 ends, 2 coordinates]; those that it has not lie far outside."""
    num_images = len(labels)
    corners = _CORNERS + hand.wobble * torch.randn(num_images, *_CORNERS.shape, generator=generator)
    scale = uniform((num_images, 1, 2), hand.scale_low, hand.scale_high, generator)
    slant = uniform((num_images, 1), -hand.slant, hand.slant, generator)
    shift = uniform((num_images, 1, 2), -hand.shift, hand.shift, generator)
    x, y = corners.unbind(-1)
    corners = torch.stack([x - slant * y, y], dim=-1) * scale + shift
    signs = labels + NUM_CLASSES * (torch.rand(num_images, generator=generator) < hand.letters)
    return torch.where(_lit()[signs][:, :, None, None], corners[:, _SEGMENTS], _FAR_AWAY)


def _stray(num_images: int, hand: _Hand, generator: Generator) -> Tensor:
    """Short strokes anywhere, that belong to no figure."""
    middle = uniform((num_images, _NUM_STRAY, 1, 2), -0.9, 0.9, generator)
    half = uniform((num_images, _NUM_STRAY, 1, 2), -hand.stray_length / 2, hand.stray_length / 2, generator)
    return torch.cat([middle - half, middle + half], dim=2)


def _distance(strokes: Tensor) -> Tensor:
    """Distance of every pixel to the nearest stroke [N, 784]."""
    axis = (torch.arange(SIDE) + 0.5) * (2 / SIDE) - 1
    pixels = torch.cartesian_prod(axis, axis).flip(-1)
    start, along = strokes[:, :, 0], strokes[:, :, 1] - strokes[:, :, 0]
    squared_length = along.square().sum(-1, keepdim=True).clamp_min(1e-6)
    offset = (pixels[None, None] - start[:, :, None]).unbind(-1)
    part = (offset[0] * along[..., :1] + offset[1] * along[..., 1:]).div_(squared_length).clamp_(0, 1)
    across = (offset[0] - part * along[..., :1]).square_() + (offset[1] - part * along[..., 1:]).square_()
    return across.amin(dim=1).sqrt_()


def _lit() -> Tensor:
    """Which segments each sign has [20, 7]: digits, then letters."""
    return torch.tensor([[str(segment) in sign for segment in range(7)] for sign in (*_DIGITS, *_LETTERS)])
