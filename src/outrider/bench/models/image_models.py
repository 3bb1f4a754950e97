"""The small models of images: three classifiers of 28 × 28 images, an autoencoder, and He et al.'s ResNets for CIFAR.

Decides their layers, and what they are trained with and measured by. Called by the zoo and the iteration benchmark.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from outrider.bench.datasets.cifar10 import normalised
from outrider.errors import ConfigError
from outrider.flow import Flow, Graph


def cross_entropy_step(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Mean cross-entropy of a batch (inputs, labels)."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


def accuracy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Fraction of a batch (inputs, labels) that the model gets right, 0 to 1."""
    inputs, labels = batch
    predicted: Tensor = model(inputs).argmax(dim=1)
    return (predicted == labels).float().mean()


def bytes_cross_entropy_step(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """The same for colour images as bytes, normalised here: a quarter of the memory where the data are kept."""
    images, labels = batch
    return cross_entropy_step(model, (normalised(images), labels))


def bytes_accuracy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Accuracy on colour images as bytes."""
    images, labels = batch
    return accuracy(model, (normalised(images), labels))


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
    return _lenet(6, 16)


def wide_lenet() -> nn.Module:
    """The same with 32 and 64 channels (186,302 parameters): one core takes a tenth of a second for a batch of 128."""
    return _lenet(32, 64)


def _lenet(first: int, second: int) -> nn.Module:
    """With so many channels in its two convolutions."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, (1, 28, 28)),
        *_conv_stage(1, first),
        *_conv_stage(first, second),
        nn.Flatten(),
        nn.Linear(16 * second, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, NUM_CLASSES),
    )


def _conv_stage(in_channels: int, out_channels: int) -> list[nn.Module]:
    return [nn.Conv2d(in_channels, out_channels, 5), nn.BatchNorm2d(out_channels), nn.ReLU(), nn.MaxPool2d(2)]


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
    """Mean squared error per pixel between images and their reconstructions; labels are ignored."""
    images = batch[0]
    return functional.mse_loss(model(images), images)


WIDTHS = (16, 32, 64)

# Both take normalised images as [N, 3, 32, 32] and return [N, 10] logits; depth 20 has 269,722 parameters.


def resnet(depth: int = 20) -> nn.Module:
    """The network as a plain module."""
    return CifarResNet(_blocks_per_stage(depth))


def resnet_graph(depth: int = 20) -> Graph:
    """The same network as a flow; its tensors come in the same order as the module's, under names of nodes."""
    flow = _normed(Flow(_convolution(3, WIDTHS[0])).label("conv"), WIDTHS[0], "bn").through(functional.relu)
    for number, (inputs, outputs) in enumerate(_block_widths(_blocks_per_stage(depth)), start=1):
        shortcut = Shortcut(outputs - inputs) if outputs > inputs else None
        flow.also(_block_flow(inputs, outputs), skip=shortcut).tag(f"block{number}").through(functional.relu)
    flow.through(nn.AdaptiveAvgPool2d(1)).through(nn.Flatten())
    graph = flow.through(nn.Linear(WIDTHS[-1], NUM_CLASSES)).label("head").build(name=f"resnet{depth}")
    graph.apply(_start_as_he)
    return graph


class CifarResNet(nn.Module):
    """One convolution, three stages of blocks, a mean over the image and a linear layer."""

    def __init__(self, blocks_per_stage: int) -> None:
        super().__init__()
        self.conv = _convolution(3, WIDTHS[0])
        self.bn = nn.BatchNorm2d(WIDTHS[0])
        self.blocks = nn.Sequential(*(Block(*widths) for widths in _block_widths(blocks_per_stage)))
        self.head = nn.Linear(WIDTHS[-1], NUM_CLASSES)
        self.apply(_start_as_he)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(functional.relu(self.bn(self.conv(images))))
        logits: Tensor = self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


class Block(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, outputs)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _convolution(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = Shortcut(outputs - inputs) if outputs > inputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.shortcut(x) + self.bn2(self.conv2(y)))


class Shortcut(nn.Module):
    """Option A: every second pixel, new channels zero."""

    def __init__(self, added_channels: int) -> None:
        super().__init__()
        self.added_channels = added_channels

    def forward(self, x: Tensor) -> Tensor:
        half = self.added_channels // 2
        return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, half, half))


def _block_flow(inputs: int, outputs: int) -> Flow:
    first = _normed(Flow(_convolution(inputs, outputs)).label("conv1"), outputs, "bn1").through(functional.relu)
    return _normed(first.through(_convolution(outputs, outputs)).label("conv2"), outputs, "bn2")


def _normed(flow: Flow, channels: int, label: str) -> Flow:
    return flow.through(nn.BatchNorm2d(channels)).label(label)


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    """3 × 3, without bias; a stage that doubles the channels halves the image."""
    stride = 2 if inputs in WIDTHS and outputs > inputs else 1
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


def _block_widths(blocks_per_stage: int) -> Sequence[tuple[int, int]]:
    """Channels in and out of each block."""
    outputs = [width for width in WIDTHS for _ in range(blocks_per_stage)]
    return list(itertools.pairwise([WIDTHS[0], *outputs]))


def _blocks_per_stage(depth: int) -> int:
    if depth < 8 or depth % 6 != 2:
        raise ConfigError(f"the depth of a CIFAR ResNet must be 6n + 2, got {depth}", hint="pass 20, 32, 44, 56 or 110")
    return (depth - 2) // 6


def _start_as_he(module: nn.Module) -> None:
    """The start of He et al. 2015: normal by the number of inputs or outputs, whichever is kept."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight)
