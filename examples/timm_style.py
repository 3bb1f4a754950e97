"""An image classifier as timm's reference script trains it, on every device: python examples/timm_style.py, or

outrider run --devices cpu,cpu@0.4 examples/timm_style.py

EMA, mixup, random erasing, label smoothing, cosine with warm-up, channels_last and autocast, with timm's own parts
where timm can be imported (it needs torchvision), otherwise with a few lines of torch.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import outrider

try:
    from timm.data.mixup import Mixup
    from timm.data.random_erasing import RandomErasing
except (ImportError, RuntimeError):
    Mixup = RandomErasing = None

NUM_CLASSES, SMOOTHING = 10, 0.1


def shapes(num_samples: int, seed: int) -> TensorDataset:
    """Colour images of 16 by 16 pixels with one of ten patterns somewhere in them, and noise."""
    patterns = torch.rand(NUM_CLASSES, 3, 5, 5, generator=torch.Generator().manual_seed(7)).round()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    images = 0.3 * torch.randn(num_samples, 3, 16, 16, generator=generator)
    corners = torch.randint(12, (num_samples, 2), generator=generator).tolist()
    for image, label, (row, column) in zip(images, labels.tolist(), corners, strict=True):
        image[:, row : row + 5, column : column + 5] += patterns[label]
    return TensorDataset(images, labels)


def mixed(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixup with the batch in reverse, and smoothed labels."""
    share = torch.distributions.Beta(0.2, 0.2).sample().item()
    off = SMOOTHING / NUM_CLASSES
    targets = torch.full((len(labels), NUM_CLASSES), off, device=images.device)
    targets.scatter_(1, labels[:, None], 1 - SMOOTHING + off)
    return share * images + (1 - share) * images.flip(0), share * targets + (1 - share) * targets.flip(0)


def erased(images: torch.Tensor) -> torch.Tensor:
    """Noise instead of a square of 4 by 4 pixels, in a quarter of the images."""
    images = images.clone()
    for number in torch.nonzero(torch.rand(len(images)) < 0.25).flatten().tolist():
        row, column = torch.randint(13, (2,)).tolist()
        images[number, :, row : row + 4, column : column + 4].normal_()
    return images


def augmentations(device: torch.device) -> tuple[Any, Any]:
    """Mixup and random erasing: timm's, or our own."""
    if Mixup is None:
        return mixed, erased
    mixup = Mixup(mixup_alpha=0.2, label_smoothing=SMOOTHING, num_classes=NUM_CLASSES)
    erasing = RandomErasing(0.25, mode="pixel", device=str(device))
    # timm mixes the two halves of a batch, so it needs an even number.
    return lambda x, y: mixup(x, y) if len(x) % 2 == 0 else mixed(x, y), erasing


def rate(step: int, *, warmup: int, total: int) -> float:
    """Cosine with a linear warm-up, as a factor; timm's CosineLRScheduler.step_update(s.global_step) gives the same."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return (model(images.contiguous(memory_format=torch.channels_last)).argmax(1) == labels).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="auto", choices=["auto", "sync", "balanced", "cadence", "async"])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--samples", type=int, default=3_000)
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"], help="bf16 is slow on CPUs without it")
    wishes = parser.parse_args()

    train_set, test_set = shapes(wishes.samples, seed=0), shapes(wishes.samples // 5, seed=1)
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 24, 5), nn.GroupNorm(4, 24), nn.ReLU(), nn.Conv2d(24, 48, 3), nn.ReLU()]
    model = nn.Sequential(*convolutions, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(48, NUM_CLASSES))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.05)

    with outrider.Session(policy=wishes.policy, max_grad_norm=1.0) as s:
        total = wishes.epochs * len(s.batches(train_set, batch_size=50))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, warmup=20, total=total))
        model, optimizer, schedule = s.prepare(model, optimizer, schedule)
        ema = s.ema(model, decay=lambda step: min(0.98, (1 + step) / (10 + step)))
        mixup, erasing = augmentations(s.device)
        for epoch in s.epochs(wishes.epochs):
            for images, labels in s.batches(train_set, batch_size=50):
                images, targets = mixup(erasing(images).contiguous(memory_format=torch.channels_last), labels)
                with torch.autocast(s.device.type, dtype=torch.bfloat16, enabled=wishes.precision == "bf16"):
                    loss = F.cross_entropy(model(images), targets)
                s.step(loss)
                ema.update()
            if s.is_main:
                now = s.evaluate(accuracy, test_set)
                mean = s.evaluate(lambda _, batch: accuracy(ema.module, batch), test_set)
                print(f"epoch {epoch}: accuracy {now:.1%}, of the mean {mean:.1%}")
        s.save("ema.safetensors", ema.module)


if __name__ == "__main__":
    main()
