"""What is done to CIFAR's images on the device: random crop and flip in training, normalisation always.

Decides by each sample's key alone, without a generator and without waiting for the device, for all samples of a batch
at once. Called by the feed (`crop_and_flip`) and by step and evaluation (`normalised`) in the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from outrider.data.keyed import below

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
