"""The three small classifiers of 28 × 28 images: logistic, mlp, lenet.

Decides their layers; parameter counts are those of the published ones and asserted in tests.
Knows no data, optimizer or device. Called by the demo, the benchmarks and the tests.
"""

from __future__ import annotations

from torch import nn

NUM_PIXELS = 28 * 28
NUM_CLASSES = 10

# All take images as [N, 1, 28, 28] or as [N, 784] and return [N, 10] logits.


def logistic() -> nn.Module:
    """One linear layer (7,850 parameters)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(NUM_PIXELS, NUM_CLASSES))


def mlp() -> nn.Module:
    """One hidden layer of 256 (203,530 parameters)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(NUM_PIXELS, 256), nn.ReLU(), nn.Linear(256, NUM_CLASSES))


def lenet() -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) with batch normalization, ReLU and max pooling (44,470 parameters)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, (1, 28, 28)),
        *_conv_stage(1, 6),
        *_conv_stage(6, 16),
        nn.Flatten(),
        nn.Linear(256, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, NUM_CLASSES),
    )


def _conv_stage(in_channels: int, out_channels: int) -> list[nn.Module]:
    return [nn.Conv2d(in_channels, out_channels, 5), nn.BatchNorm2d(out_channels), nn.ReLU(), nn.MaxPool2d(2)]
