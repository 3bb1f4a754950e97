"""A script with Trainers, as a user of Lightning writes it: python lightning_script.py FOLDER CASE...

Each rank writes what it saw of a case to FOLDER/CASE-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from outrider.api.session import open_session
from outrider.integrations.lightning import OutriderStrategy

FOLDER = Path(sys.argv[1])
NUM_TRAIN, NUM_VALID, BATCH = 330, 70, 32


def data(num_samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, 8, generator=generator)
    return TensorDataset(inputs, (inputs[:, :4].sum(1) > inputs[:, 4:].sum(1)).long(), torch.arange(num_samples))


class Classifier(L.LightningModule):
    def __init__(self, total_steps: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))
        self.total_steps = total_steps
        self.trained: list[list[int]] = []
        self.validated: list[list[int]] = []
        self.rates: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.trained.append([])

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, labels, ids = batch
        session = open_session()
        if session is None or session.batch_samples:
            self.trained[-1] += ids.tolist()
        loss = F.cross_entropy(self.net(inputs), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        inputs, labels, ids = batch
        self.validated[-1] += ids.tolist()
        self.log("valid_loss", F.cross_entropy(self.net(inputs), labels), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        total = self.total_steps or int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class PerEpoch(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Unhurried(PerEpoch):
    """Steps so long that a rank which comes late still finds a batch."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)


class TwoOptimizers(Classifier):
    """Manual optimization: the two layers have optimizers of their own, and take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        inputs, labels, _ = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(inputs), labels))
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.net[0].parameters(), lr=0.05)
        second = torch.optim.SGD([*self.net[1].parameters(), *self.net[3].parameters()], lr=0.05)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5)]


class StopOnRankOne(Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.global_rank == 1 and trainer.fit_loop.batch_idx == 1


def options_of(policy: str) -> dict[str, Any]:
    """Local steps in fixed shares: in an epoch of few batches a rank that is slow by chance would get none."""
    is_shared = os.environ.get("OUTRIDER_DEVICES", "").count(",") == 1
    return {"policy": policy, "seed": 3, **({"shares": (0.6, 0.4)} if policy == "cadence" and is_shared else {})}


def fit(case: str, module: Classifier, policy: str | None, *, is_shuffled: bool = True, **wishes: Any) -> L.Trainer:
    strategy = {"strategy": OutriderStrategy(**options_of(policy))} if policy else {}
    ckpt_path = wishes.pop("ckpt_path", None)
    settings = {"accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_checkpointing": False, **strategy}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": FOLDER / case}
    trainer = L.Trainer(**settings | quiet | wishes)  # type: ignore[arg-type]
    train = DataLoader(data(NUM_TRAIN, 1), batch_size=BATCH, shuffle=is_shuffled)
    if policy is None:
        # Lightning's own sampler would shuffle.
        sampler = DistributedSampler(train.dataset, 2, int(os.environ.get("LOCAL_RANK", 0)), shuffle=False)
        train = DataLoader(train.dataset, batch_size=BATCH, sampler=sampler)
    trainer.fit(module, train, DataLoader(data(NUM_VALID, 2), batch_size=16), ckpt_path=ckpt_path)
    facts = {
        "weights": nn.utils.parameters_to_vector(module.parameters()).tolist(),
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "num_batches": trainer.num_training_batches,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "rates": module.rates,
        "trained": module.trained,
        "validated": module.validated,
    }
    (FOLDER / f"{case}-{trainer.global_rank}.json").write_text(json.dumps(facts))
    return trainer


def resumed(case: str, policy: str) -> None:
    saving = ModelCheckpoint(dirpath=FOLDER / case, monitor="valid_loss", save_last=True)
    steps = 4 * 11
    fit(f"{case}-half", Classifier(steps), policy, callbacks=[saving], enable_checkpointing=True)
    fit(case, Classifier(steps), policy, max_epochs=4, ckpt_path=FOLDER / case / "last.ckpt")


CASES: dict[str, Callable[[str], object]] = {
    "plain": lambda case: fit(
        case, Classifier(), "balanced", accumulate_grad_batches=3, gradient_clip_val=0.2, callbacks=[stopping()]
    ),
    "epochs": lambda case: fit(case, PerEpoch(), "balanced", val_check_interval=0.5, limit_train_batches=8),
    "manual": lambda case: fit(case, TwoOptimizers(), "balanced"),
    "whole": lambda case: fit(case, Classifier(44), "balanced", max_epochs=4),
    "resumed": lambda case: resumed(case, "balanced"),
    "joined": lambda case: fit(case, Classifier(), "sync", is_shuffled=False),
    "ddp": lambda case: fit(case, Classifier(), None, is_shuffled=False, strategy="ddp", devices=2),
    "local": lambda case: fit(case, Classifier(), "cadence", val_check_interval=0.5),
    "limited": lambda case: fit(case, Unhurried(), "async", limit_train_batches=8, max_epochs=3),
    "steps": lambda case: fit(case, Classifier(15), "cadence", max_steps=15, max_epochs=-1),
    "stopped": lambda case: fit(case, PerEpoch(), "cadence", callbacks=[StopOnRankOne()], max_epochs=5),
    "logging": lambda case: fit(case, PerStep(), "cadence"),
}


class PerStep(PerEpoch):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("now", loss, on_step=True, sync_dist=True)
        return loss


def stopping() -> EarlyStopping:
    return EarlyStopping("valid_loss", patience=3)


if __name__ == "__main__":
    for wish in sys.argv[2:]:
        CASES[wish](wish)
