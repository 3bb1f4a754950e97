"""A LightningModule on every device: python examples/lightning_trainer.py, or

outrider run --devices cpu,cpu@0.4 examples/lightning_trainer.py

The only difference to a script for one device is the argument `strategy`. `--resume` goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from outrider.integrations.lightning import OutriderStrategy


def spirals(num_samples: int, seed: int) -> TensorDataset:
    """Points on two spirals that wind around each other."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (num_samples,), generator=generator)
    radius = 0.2 + 0.8 * torch.rand(num_samples, generator=generator)
    angle = 7 * radius + torch.pi * labels
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points + 0.02 * torch.randn(points.shape, generator=generator), labels)


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        points, labels = batch
        loss = F.cross_entropy(self.net(points), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        points, labels = batch
        scores = self.net(points)
        self.log("valid_loss", F.cross_entropy(scores, labels), sync_dist=True)
        self.log("accuracy", (scores.argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="balanced", choices=["sync", "balanced", "cadence", "async"])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--resume", action="store_true")
    wishes = parser.parse_args()

    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=OutriderStrategy(policy=wishes.policy),
        max_epochs=wishes.epochs,
        gradient_clip_val=1.0,
        callbacks=[
            EarlyStopping("valid_loss", patience=3),
            ModelCheckpoint(dirpath="checkpoints", monitor="valid_loss", save_last=True),
        ],
        enable_progress_bar=False,
        logger=False,
    )
    train_loader = DataLoader(spirals(6_000, seed=0), batch_size=32, shuffle=True)
    valid_loader = DataLoader(spirals(1_000, seed=1), batch_size=100)
    trainer.fit(Classifier(), train_loader, valid_loader, ckpt_path="last" if wishes.resume else None)
    if trainer.is_global_zero:
        print(f"step {trainer.global_step}: accuracy {trainer.callback_metrics['accuracy']:.1%}")


if __name__ == "__main__":
    main()
