"""A script in the shape of accelerate's cv_example, on every device: python examples/accelerate_cv.py, or

outrider run --devices cpu,cpu@0.4 examples/accelerate_cv.py

The only difference to a script of accelerate is where `Accelerator` comes from. Images are made here, so that nothing
is downloaded: the class is the quadrant that is brighter.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from outrider.integrations.accelerate import Accelerator


def make_images(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    images, labels = torch.rand(count, 3, 8, 8, generator=generator), torch.randint(4, (count,), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = 4 * (label // 2), 4 * (label % 2)
        image[:, row : row + 4, column : column + 4] += 0.1
    return TensorDataset(images, labels)


def make_model() -> nn.Module:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), head)


def training_function(wishes: argparse.Namespace) -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(7)
    train_set, eval_set = make_images(600, seed=1), make_images(150, seed=2)
    train_dataloader = DataLoader(train_set, shuffle=True, batch_size=20)
    eval_dataloader = DataLoader(eval_set, shuffle=False, batch_size=40)
    model = make_model().to(accelerator.device)
    mean = torch.full((1, 3, 1, 1), 0.5, device=accelerator.device)
    optimizer = torch.optim.Adam(params=model.parameters(), lr=1e-2 / 25)
    lr_scheduler = OneCycleLR(
        optimizer=optimizer, max_lr=1e-2, epochs=wishes.num_epochs, steps_per_epoch=len(train_dataloader)
    )

    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    starting_epoch = 0
    if wishes.resume_from_checkpoint:
        accelerator.load_state(wishes.resume_from_checkpoint)
        starting_epoch = int(os.path.basename(wishes.resume_from_checkpoint).removeprefix("epoch_")) + 1

    for epoch in range(starting_epoch, wishes.stop_after or wishes.num_epochs):
        model.train()
        for images, labels in train_dataloader:
            outputs = model(images - mean)
            loss = F.cross_entropy(outputs, labels)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        model.eval()
        right, count = 0, 0
        for images, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(images - mean).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, labels))
            right, count = right + int((predictions == references).sum()), count + len(references)
        rate = lr_scheduler.get_last_lr()[0]
        accelerator.print(f"epoch {epoch}: accuracy {right / count:.4f} of {count}, rate {rate:.6f}")
        accelerator.save_state(f"checkpoints/epoch_{epoch}")

    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--stop_after", type=int)
    parser.add_argument("--resume_from_checkpoint")
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
