"""ResNets (He et al. 2015) and ResNeXts (Xie et al. 2017) for ImageNet images, with torchvision's names.

Decides layers and names so that torchvision's weights load and give the same outputs; counts are asserted in tests.
Also takes small images: `num_classes=10` on 32 × 32 is what CIFAR comparisons use. Called by the benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

IMAGENET_CLASSES = 1000
_STAGE_WIDTHS = (64, 128, 256, 512)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The parameters of one network of the family."""

    blocks: tuple[int, int, int, int]
    """In each of the four stages."""
    is_bottleneck: bool = True
    groups: int = 1
    width_per_group: int = 64


class ImagenetResNet(nn.Module):
    """Images [N, 3, H, W], normalised, to logits; parameter names are torchvision's."""

    def __init__(self, plan: _Plan, num_classes: int = IMAGENET_CLASSES) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        inputs = 64
        for stage, width in enumerate(_STAGE_WIDTHS):
            blocks = _stage(plan, inputs, width, num_blocks=plan.blocks[stage], stride=1 if stage == 0 else 2)
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
            inputs = blocks[-1].outputs
        self.fc = nn.Linear(inputs, num_classes)
        self.apply(_start_as_torchvision)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(images))), 3, stride=2, padding=1)
        for stage in range(1, len(_STAGE_WIDTHS) + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        logits: Tensor = self.fc(functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


class BasicBlock(nn.Module):
    """Two convolutions of 3 × 3."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.outputs = width
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(inputs, self.outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1 × 1 down, 3 × 3 in groups, 1 × 1 up to four times the width; the stride is in the middle."""

    def __init__(self, inputs: int, width: int, stride: int, *, groups: int, width_per_group: int) -> None:
        super().__init__()
        self.outputs = 4 * width
        inner = width * width_per_group // 64 * groups
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, self.outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(self.outputs)
        self.downsample = _downsample(inputs, self.outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


def _stage(plan: _Plan, inputs: int, width: int, *, num_blocks: int, stride: int) -> Sequence[BasicBlock | Bottleneck]:
    blocks = [_block(plan, inputs, width, stride)]
    for _ in range(1, num_blocks):
        blocks.append(_block(plan, blocks[-1].outputs, width, stride=1))
    return blocks


def _block(plan: _Plan, inputs: int, width: int, stride: int) -> BasicBlock | Bottleneck:
    if plan.is_bottleneck:
        return Bottleneck(inputs, width, stride, groups=plan.groups, width_per_group=plan.width_per_group)
    return BasicBlock(inputs, width, stride)


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    """What brings a block's input to the shape of its output, where they differ."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def _start_as_torchvision(module: nn.Module) -> None:
    """Convolutions normal by their outputs (He et al.); the rest as torch does."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


resnet18 = partial(ImagenetResNet, _Plan(blocks=(2, 2, 2, 2), is_bottleneck=False))  # 11,689,512 parameters
resnet34 = partial(ImagenetResNet, _Plan(blocks=(3, 4, 6, 3), is_bottleneck=False))  # 21,797,672
resnet50 = partial(ImagenetResNet, _Plan(blocks=(3, 4, 6, 3)))  # 25,557,032
resnet101 = partial(ImagenetResNet, _Plan(blocks=(3, 4, 23, 3)))  # 44,549,160
resnext50_32x4d = partial(ImagenetResNet, _Plan(blocks=(3, 4, 6, 3), groups=32, width_per_group=4))  # 25,028,904
resnext101_32x8d = partial(ImagenetResNet, _Plan(blocks=(3, 4, 23, 3), groups=32, width_per_group=8))  # 88,791,336
