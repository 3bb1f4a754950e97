"""A small U-Net: the way down leaves tags, the way up merges them back in.

Learns to find discs in noisy images made here, and draws itself.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.flow import Flow, Graph


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(4, outputs), nn.ReLU())


def unet() -> Graph:
    return (
        Flow(convolution(1, 8)).tag("fine")
        .through(convolution(8, 16, stride=2)).tag("middle")
        .through(convolution(16, 32, stride=2)).tag("coarse")
        .also(convolution(32, 32))
        .through(nn.ConvTranspose2d(32, 16, 2, 2)).label("up1")
        .merge("cat").using("middle")
        .through(convolution(32, 16)).label("refine1")
        .through(nn.ConvTranspose2d(16, 8, 2, 2)).label("up2")
        .merge("cat").using("fine")
        .through(convolution(16, 8)).label("refine2")
        .through(nn.Conv2d(8, 1, 1)).label("head")
        .build(name="unet", example=torch.zeros(2, 1, 32, 32))
    )  # fmt: skip


def discs(count: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Noisy images of one disc each, and the masks to be found."""
    row, column = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centre = torch.randint(8, size - 8, (count, 2, 1, 1))
    radius = torch.randint(4, 8, (count, 1, 1))
    masks = ((row - centre[:, 0]) ** 2 + (column - centre[:, 1]) ** 2 < radius**2).float()[:, None]
    return masks + 0.5 * torch.randn_like(masks), masks


def overlap(model: nn.Module, images: Tensor, masks: Tensor) -> float:
    """Intersection over union."""
    with torch.no_grad():
        found = model(images) > 0
    return float((found & masks.bool()).sum() / (found | masks.bool()).sum())


def main() -> None:
    torch.manual_seed(0)
    model = unet()
    images, masks = discs(64)
    test_images, test_masks = discs(32)
    print(model.summary(depth=1))
    print(f"overlap before: {overlap(model, test_images, test_masks):.2f}")

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(6):
        for chosen in torch.randperm(len(images)).split(16):
            loss = F.binary_cross_entropy_with_logits(model(images[chosen]), masks[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"overlap after:  {overlap(model, test_images, test_masks):.2f}")

    with tempfile.TemporaryDirectory() as folder:
        picture = model.draw(Path(folder) / "unet.svg")
        print(f"{picture.name}: {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
