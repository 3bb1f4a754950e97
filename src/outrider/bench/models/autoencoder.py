"""The convolutional autoencoder of 28 × 28 images, and what it is trained with and measured by.

Decides its layers (9,569 parameters) and that it is held against its own input. Knows no data, optimizer or device.
Called by the benchmarks, `step` and `evaluate` in the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional


def conv_autoencoder() -> nn.Module:
    """Two strided convolutions down to 32 × 7 × 7, two transposed ones back up, all 3 × 3."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 3, stride=2, padding=1, output_padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 3, stride=2, padding=1, output_padding=1),
        nn.Sigmoid(),
    )


def reconstruction_error(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Mean squared error per pixel between images and what the model makes of them; the labels are not looked at."""
    images = batch[0]
    return functional.mse_loss(model(images), images)
