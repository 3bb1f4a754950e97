"""An image classifier in a loop of Lightning Fabric: python examples/lightning_fabric_classifier.py, or

outrider run --devices cpu,cpu@0.4 examples/lightning_fabric_classifier.py
torchrun --nproc-per-node 2 examples/lightning_fabric_classifier.py

The only difference to a script for one device is the argument `strategy`.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from outrider.integrations.lightning import OutriderFabricStrategy


def digits(num_samples: int, seed: int) -> TensorDataset:
    """Images of 12 by 12 pixels with a digit of a pixel font somewhere in them, and noise."""
    generator = torch.Generator().manual_seed(seed)
    glyphs = torch.rand(10, 5, 3, generator=torch.Generator().manual_seed(7)).round()
    labels = torch.randint(10, (num_samples,), generator=generator)
    images = 0.3 * torch.randn(num_samples, 1, 12, 12, generator=generator)
    rows = torch.randint(8, (num_samples,), generator=generator)
    columns = torch.randint(10, (num_samples,), generator=generator)
    for image, label, row, column in zip(images, labels, rows, columns, strict=True):
        image[0, row : row + 5, column : column + 3] += glyphs[label]
    return TensorDataset(images, labels)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return F.log_softmax(self.fc(self.dropout(x.amax((2, 3)))), dim=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="balanced", choices=["sync", "balanced", "cadence", "async"])
    parser.add_argument("--epochs", type=int, default=6)
    hparams = parser.parse_args()

    fabric = Fabric(strategy=OutriderFabricStrategy(policy=hparams.policy))
    fabric.launch()
    seed_everything(42)

    train_loader = DataLoader(digits(4_000, seed=0), batch_size=64, shuffle=True)
    test_loader = DataLoader(digits(1_000, seed=1), batch_size=250)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    test_accuracy = MulticlassAccuracy(10, average="micro").to(fabric.device)

    for epoch in range(hparams.epochs):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            fabric.backward(loss)
            optimizer.step()
        scheduler.step()

        model.eval()
        test_loss = torch.tensor(0.0, device=fabric.device)
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                test_loss += F.nll_loss(output, target, reduction="sum")
                test_accuracy(output, target)
        test_loss = fabric.all_reduce(test_loss, reduce_op="sum") / len(test_loader.dataset)
        fabric.print(f"epoch {epoch}: loss {test_loss:.4f}, accuracy {test_accuracy.compute():.1%}")
        test_accuracy.reset()

    fabric.save("digits.ckpt", {"model": model})


if __name__ == "__main__":
    main()
