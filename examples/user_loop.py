"""Your own loop on every device: python examples/user_loop.py, or

outrider run --devices cpu,cpu@0.4 examples/user_loop.py
torchrun --nproc-per-node 2 examples/user_loop.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import outrider


def spirals(num_samples: int, seed: int) -> TensorDataset:
    """Points on two spirals that wind around each other."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (num_samples,), generator=generator)
    radius = 0.2 + 0.8 * torch.rand(num_samples, generator=generator)
    angle = 7 * radius + torch.pi * labels
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points + 0.02 * torch.randn(points.shape, generator=generator), labels)


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    points, labels = batch
    return (model(points).argmax(1) == labels).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="auto", choices=["auto", "sync", "balanced", "cadence", "async"])
    parser.add_argument("--epochs", type=int, default=8)
    wishes = parser.parse_args()

    train_set, test_set = spirals(6_000, seed=0), spirals(1_000, seed=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    total_batches = wishes.epochs * len(train_set) // 32
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=total_batches + 1)

    with outrider.Session(policy=wishes.policy, max_grad_norm=1.0) as s:
        # The schedule moves with the samples of all ranks, so it ends where training does.
        model, optimizer, scheduler = s.prepare(model, optimizer, scheduler)
        for epoch in s.epochs(wishes.epochs):
            for points, labels in s.batches(train_set, batch_size=32):
                loss = F.cross_entropy(model(points), labels)
                s.step(loss)
                s.log("confidence", F.softmax(model(points).detach(), 1).amax(1).mean())
            if s.is_main:
                print(f"epoch {epoch}: accuracy {s.evaluate(accuracy, test_set):.1%}")
        if s.is_main and s.metrics is not None:
            shares = ", ".join(f"{share:.0%}" for share in s.metrics.share_by_rank)
            print(f"each rank's share of the samples: {shares}; confidence {s.metrics.logged['confidence']:.2f}")


if __name__ == "__main__":
    main()
