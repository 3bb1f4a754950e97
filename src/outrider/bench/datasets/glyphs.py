"""Ten classes of 28 × 28 grey images, drawn by the program: the stand-in where no real data is at hand.

Decides what they look like: seven-segment signs drawn by an unsteady hand, with noise and stray strokes.
After 5 epochs a linear model gets about 84 % right, the MLP 95 %, LeNet 99 %. Called by the demo and the benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.utils.data import TensorDataset

from outrider.bench.datasets.pair import DataPair, Part
from outrider.data.order import mix

NAME = "glyphs (stand-in)"
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
        name=NAME,
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
    width = _uniform(num_images, hand.width_low, hand.width_high, generator)[:, None]
    ink = torch.sigmoid((width - _distance(strokes)) * SIDE)
    grey = ink * _uniform(num_images, hand.darkest, 1.0, generator)[:, None]
    return (
        grey.add_(torch.randn(grey.shape, generator=generator), alpha=hand.noise).clamp_(0, 1).view(-1, 1, SIDE, SIDE)
    )


def _figure(labels: Tensor, hand: _Hand, generator: Generator) -> Tensor:
    """Strokes of each label's figure [N, 7, 2 ends, 2 coordinates]; those that it has not lie far outside."""
    num_images = len(labels)
    corners = _CORNERS + hand.wobble * torch.randn(num_images, *_CORNERS.shape, generator=generator)
    scale = _uniform((num_images, 1, 2), hand.scale_low, hand.scale_high, generator)
    slant = _uniform((num_images, 1), -hand.slant, hand.slant, generator)
    shift = _uniform((num_images, 1, 2), -hand.shift, hand.shift, generator)
    x, y = corners.unbind(-1)
    corners = torch.stack([x - slant * y, y], dim=-1) * scale + shift
    signs = labels + NUM_CLASSES * (torch.rand(num_images, generator=generator) < hand.letters)
    return torch.where(_lit()[signs][:, :, None, None], corners[:, _SEGMENTS], _FAR_AWAY)


def _stray(num_images: int, hand: _Hand, generator: Generator) -> Tensor:
    """Short strokes anywhere, that belong to no figure."""
    middle = _uniform((num_images, _NUM_STRAY, 1, 2), -0.9, 0.9, generator)
    half = _uniform((num_images, _NUM_STRAY, 1, 2), -hand.stray_length / 2, hand.stray_length / 2, generator)
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


def _uniform(shape: int | tuple[int, ...], low: float, high: float, generator: Generator) -> Tensor:
    return torch.rand(shape, generator=generator) * (high - low) + low
