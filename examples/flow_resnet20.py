"""ResNet-20 for CIFAR-sized images, written twice: by hand and as a flow. Same weights, same outputs.

Then trains the flow for a few steps on striped images made here.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.flow import Flow, Graph


class Shortcut(nn.Module):
    """He et al.'s option A: every second pixel, new channels zero; no parameters."""

    def __init__(self, added_channels: int) -> None:
        super().__init__()
        self.added_channels = added_channels

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.added_channels // 2, self.added_channels // 2))


def block_flow(inputs: int, outputs: int) -> Flow:
    stride = outputs // inputs
    return (
        Flow(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)).label("conv1")
        .through(nn.BatchNorm2d(outputs)).label("bn1")
        .through(F.relu)
        .through(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)).label("conv2")
        .through(nn.BatchNorm2d(outputs)).label("bn2")
    )  # fmt: skip


def resnet20_flow(blocks_per_stage: int = 3, classes: int = 10) -> Graph:
    flow = Flow(nn.Conv2d(3, 16, 3, 1, 1, bias=False)).label("conv").through(nn.BatchNorm2d(16)).label("bn")
    flow.through(F.relu)
    inputs = 16
    for stage, outputs in enumerate((16, 32, 64), start=1):
        for block in range(1, blocks_per_stage + 1):
            skip = Shortcut(outputs - inputs) if outputs > inputs else None
            flow.also(block_flow(inputs, outputs), skip=skip).tag(f"stage{stage}_block{block}").through(F.relu)
            inputs = outputs
    flow.through(nn.AdaptiveAvgPool2d(1)).through(nn.Flatten()).through(nn.Linear(64, classes)).label("head")
    return flow.build(name="resnet20")


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, outputs // inputs, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = Shortcut(outputs - inputs) if outputs > inputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(self.shortcut(x) + y)


class PlainResNet20(nn.Module):
    def __init__(self, blocks_per_stage: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        widths = [16] + [width for width in (16, 32, 64) for _ in range(blocks_per_stage)]
        self.blocks = nn.Sequential(*(Block(a, b) for a, b in itertools.pairwise(widths)))
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.conv(x))))
        logits: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Both networks hold their tensors in the same order, under different names."""
    pairs = zip(source.state_dict().values(), target.state_dict().values(), strict=True)
    for ours, theirs in pairs:
        theirs.copy_(ours)


def striped_images(count: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Noisy stripes: the class says how wide they are."""
    labels = torch.arange(count) % 4
    waves = torch.sin(torch.arange(size) * (labels[:, None] + 1) * 0.7)
    images = waves[:, None, :, None] + 0.3 * torch.randn(count, 3, size, size)
    return images, labels


def main() -> None:
    torch.manual_seed(0)
    model, plain = resnet20_flow(), PlainResNet20()
    copy_weights(model, plain)
    images, labels = striped_images(128)
    same = torch.equal(model.eval()(images), plain.eval()(images))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, outputs equal to the hand-written: {same}")

    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        for chosen in torch.randperm(len(images)).split(32):
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    accuracy = (model(images).argmax(1) == labels).float().mean()
    print(f"after 3 epochs of 128 striped images: loss {loss:.3f}, accuracy {accuracy:.0%}")


if __name__ == "__main__":
    main()
