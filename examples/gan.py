"""A GAN with two optimizers in your own loop, on every device: python examples/gan.py, or

outrider run --devices cpu,cpu@0.4 examples/gan.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import outrider

NOISE = 8


def ring(num_samples: int) -> TensorDataset:
    """Points near the unit circle: what the generator is to learn."""
    generator = torch.Generator().manual_seed(0)
    angle = 2 * torch.pi * torch.rand(num_samples, generator=generator)
    radius = 1 + 0.05 * torch.randn(num_samples, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1))


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def judged(discriminator: nn.Module, points: torch.Tensor, is_real: float) -> torch.Tensor:
    scores = discriminator(points)
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, is_real))


def radius_of(generator: nn.Module, num_points: int, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        return generator(torch.randn(num_points, NOISE, device=device)).norm(dim=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="auto", choices=["auto", "sync", "balanced", "cadence", "async"])
    parser.add_argument("--epochs", type=int, default=12)
    wishes = parser.parse_args()

    torch.manual_seed(0)
    data = ring(4_000)
    generator, discriminator = network(NOISE, 2), network(2, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.99))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), 1e-3, betas=(0.5, 0.99))

    with outrider.Session(policy=wishes.policy) as s:
        s.prepare(generator, discriminator, generator_optimizer, discriminator_optimizer)
        for epoch in s.epochs(wishes.epochs):
            for (real,) in s.batches(data, batch_size=64):
                fake = generator(torch.randn(len(real), NOISE, device=s.device))

                # The generator's backward pass leaves gradients in the discriminator: start clean.
                discriminator_optimizer.zero_grad()
                s.backward(judged(discriminator, real, 1.0) + judged(discriminator, fake.detach(), 0.0))
                s.optimizer_step(discriminator_optimizer)

                s.backward(judged(discriminator, fake, 1.0))
                s.optimizer_step(generator_optimizer)
            if s.is_main:
                radius = radius_of(generator, 1_000, s.device)
                print(f"epoch {epoch}: generated points lie at radius {radius.mean():.2f} ± {radius.std():.2f}")


if __name__ == "__main__":
    main()
