"""What a framework costs beside a loop of one's own in a `Session`: the same steps, several ways.

Every way trains the same small network on the same batches with policy `sync` on two CPU ranks. All ways run at once,
but take turns: one epoch each, in a circle, while the others wait. So what else the machine does hits all of them
alike. Measured is the time of each epoch, with its end, on rank 0. `table` writes the ratio of each way to the
loop of the same round, with the interval of a bootstrap over rounds.

    python benchmarks/integration_cost.py run records.jsonl --rounds 100
    python benchmarks/integration_cost.py table records.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import turns
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH, WIDTH = 4_096, 64, 512
EPOCHS = int(os.environ.get("EPOCHS", "5"))
STEPS = SAMPLES // BATCH // turns.RANKS
NORM = 1.0
"""Gradients are clipped: the Trainer of transformers computes their norm in any case."""


class Rows(Dataset[dict[str, Tensor]]):
    """Rows by name, as Hugging Face has them."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(0)
        self.rows = torch.randn(SAMPLES, WIDTH, generator=numbers)
        self.labels = torch.randint(10, (SAMPLES,), generator=numbers)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"rows": self.rows[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )

    def forward(self, rows: Tensor, labels: Tensor) -> dict[str, Tensor]:
        turns.step()
        return {"loss": F.cross_entropy(self.net(rows), labels)}


def loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Rows(), batch_size=BATCH, shuffle=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loop(options: dict[str, Any]) -> None:
    import outrider

    model = Classifier()
    optimizer = sgd(model)
    with outrider.Session(**options) as s:
        s.prepare(model, optimizer)
        data = loader()
        for _ in range(EPOCHS):
            for batch in s.batches(data):
                s.backward(model(**batch)["loss"])
                nn.utils.clip_grad_norm_(model.parameters(), NORM)
                s.optimizer_step()


def trainer(options: dict[str, Any]) -> None:
    from transformers import TrainingArguments

    from outrider.integrations.huggingface import Trainer

    args = TrainingArguments(
        output_dir=str(options["run_dir"]) + "-out",
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        learning_rate=0.01,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=NORM,
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        remove_unused_columns=False,
        use_cpu=True,
    )
    Trainer(model=Classifier(), args=args, train_dataset=Rows(), session_options=options).train()


def accelerate(options: dict[str, Any]) -> None:
    from outrider.integrations.accelerate import Accelerator

    accelerator = Accelerator(session_options=options)
    model = Classifier()
    model, optimizer, data = accelerator.prepare(model, sgd(model), loader())
    for _ in range(EPOCHS):
        for batch in data:
            accelerator.backward(model(**batch)["loss"])
            accelerator.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


def lightning(options: dict[str, Any]) -> None:
    import lightning as L

    from outrider.integrations.lightning import OutriderStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = Classifier()

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.classifier(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.classifier)

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    L.Trainer(
        strategy=OutriderStrategy(**options),
        accelerator="cpu",
        max_epochs=EPOCHS,
        gradient_clip_val=NORM,
        enable_checkpointing=False,
        **quiet,
    ).fit(Module(), loader())


def fabric(options: dict[str, Any]) -> None:
    from lightning.fabric import Fabric

    from outrider.integrations.lightning import OutriderFabricStrategy

    fabric = Fabric(accelerator="cpu", strategy=OutriderFabricStrategy(**options))
    fabric.launch()
    model = Classifier()
    model, optimizer = fabric.setup(model, sgd(model))
    data = fabric.setup_dataloaders(loader())
    for _ in range(EPOCHS):
        for batch in data:
            fabric.backward(model(**batch)["loss"])
            fabric.clip_gradients(model, optimizer, max_norm=NORM)
            optimizer.step()
            optimizer.zero_grad()


WAYS: dict[str, Callable[[dict[str, Any]], None]] = {
    "loop": loop,
    "trainer": trainer,
    "accelerate": accelerate,
    "lightning": lightning,
    "fabric": fabric,
}


def run(path: Path, rounds: int) -> None:
    def command(way: str, folder: Path) -> list[str]:
        return [sys.executable, "-W", "ignore", __file__, "one", way, str(folder / way)]

    found = turns.take_turns(list(WAYS), command, rounds=rounds, steps=STEPS)
    with path.open("a") as file:
        for times in found:
            file.write(json.dumps(times, separators=(",", ":")) + "\n")


def table(path: Path) -> None:
    rounds = [json.loads(line) for line in path.read_text().splitlines()]
    own = sorted(times["loop"] for times in rounds)
    print(f"loop: {own[len(own) // 2]:.0f} ms per epoch of {STEPS} steps, {own[0]:.0f} to {own[-1]:.0f}\n")
    print("| way | time ÷ loop, median | 95 % interval | rounds |\n| --- | --- | --- | --- |")
    for way in list(WAYS)[1:]:
        print(f"| {way} | {turns.ratio_in_words(rounds, way, 'loop')} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table", "one"])
    parser.add_argument("path", help="the file of records; for one, the way")
    parser.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=100)
    wishes = parser.parse_args()
    if wishes.what == "run":
        run(Path(wishes.path), wishes.rounds)
    elif wishes.what == "table":
        table(Path(wishes.path))
    else:
        WAYS[wishes.path](
            {
                "policy": "sync",
                "devices": "cpu,cpu",
                "run_dir": wishes.folder,
                "quiet": True,
                "seed": 0,
                "threads_per_rank": 1,
            }
        )


if __name__ == "__main__":
    main()
