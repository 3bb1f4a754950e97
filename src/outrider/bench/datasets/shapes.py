"""Ten classes of 32 × 32 coloured images, drawn by the program: the stand-in for CIFAR-10.

Decides what they look like: five figures, plain or striped, anywhere, turned, in any colours, with noise; so neither
colour nor place gives a class away. Called by the benchmarks where no real data is at hand.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor
from torch.utils.data import TensorDataset

from outrider.bench.datasets.pair import Part
from outrider.data.order import mix

NAME = "coloured shapes (stand-in)"
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
    size = _uniform((num_images, 1, 1), 0.4, 0.75, generator)
    x, y = _own_axes(num_images, size, generator)
    distance = _distances(x, y)[labels % _NUM_FIGURES, torch.arange(num_images)] * size
    inside = torch.sigmoid(-distance * SIDE)[:, None]
    striped = (labels >= _NUM_FIGURES)[:, None, None] & (torch.sin(_STRIPES * x) > 0)
    ground = torch.rand(num_images, 3, 1, 1, generator=generator)
    # At least a third away from the ground in every channel, so that the figure is seen.
    figure = (ground + _uniform((num_images, 3, 1, 1), 0.33, 0.67, generator)) % 1.0
    ink = torch.where(striped[:, None], ground, figure)
    noise = _NOISE * torch.randn(num_images, 3, SIDE, SIDE, generator=generator)
    return torch.lerp(ground.expand_as(ink), ink, inside).add_(noise).clamp_(0, 1).mul_(255).round_().to(torch.uint8)


def _own_axes(num_images: int, size: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Every pixel's place [N, 32, 32] as the figure sees it: shifted, turned, in units of its size."""
    axis = (torch.arange(SIDE) + 0.5) * (2 / SIDE) - 1
    angle = _uniform((num_images, 1, 1), -0.5, 0.5, generator)
    shift = _uniform((2, num_images, 1, 1), -0.25, 0.25, generator)
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


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: Generator) -> Tensor:
    return torch.rand(shape, generator=generator) * (high - low) + low
