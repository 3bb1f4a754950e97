"""A flow with several inputs and two outputs: an image, a table row and a mask go in; a class and a hint come out.

`input` names what goes in besides the first, `using` feeds it to a node, `output` lets a tag out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.flow import Flow, FlowError, Graph


class Modulate(nn.Module):
    """Scale and shift the channels of an image by what a table row says."""

    def __init__(self, channels: int, facts: int) -> None:
        super().__init__()
        self.scale_and_shift = nn.Linear(facts, 2 * channels)

    def forward(self, image: Tensor, facts: Tensor) -> Tensor:
        scale, shift = self.scale_and_shift(facts)[:, :, None, None].chunk(2, dim=1)
        modulated: Tensor = image * (1 + scale) + shift
        return modulated


def masked(image: Tensor, mask: Tensor) -> Tensor:
    return image * mask


def pooled(image: Tensor) -> Tensor:
    return image.mean((2, 3))


def classifier() -> Flow:
    return (
        Flow(masked, input="image").using("mask")
        .input("facts", "mask")
        .through(nn.Conv2d(1, 8, 3, padding=1)).label("features")
        .through(Modulate(8, 3)).using("facts").label("modulate")
        .through(nn.ReLU())
        .through(pooled)
        .fork(nn.Linear(8, 1)).tag("brightness")
        .through(nn.Linear(8, 2)).label("head")
        .output("brightness")
    )  # fmt: skip


def samples(count: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """The class is whether the visible part is bright, or dark where the first fact is negative."""
    level = torch.randn(count, 1, 1, 1)
    image = level + 0.3 * torch.randn(count, 1, 8, 8)
    mask = (torch.rand(count, 1, 8, 8) > 0.5).float()
    facts = torch.randn(count, 3)
    labels = ((level[:, 0, 0, 0] > 0) ^ (facts[:, 0] < 0)).long()
    return (image, facts, mask), labels, level[:, 0, 0]


def main() -> None:
    torch.manual_seed(0)
    inputs, labels, level = samples(256)
    model: Graph = classifier().build(name="classifier", example=inputs)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(1, 121):
        logits, brightness = model(*inputs)
        loss = F.cross_entropy(logits, labels) + F.mse_loss(brightness, level)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (1, 120):
            accuracy = (logits.argmax(1) == labels).float().mean()
            print(f"step {step}: loss {loss:.3f}, accuracy {accuracy:.0%}")
    try:
        classifier().build(name="classifier")(inputs[0])
    except FlowError as error:
        print(error)


if __name__ == "__main__":
    main()
