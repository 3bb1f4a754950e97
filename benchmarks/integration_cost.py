"""What a framework costs beside a loop of one's own in a `Session`: the same steps, several ways.

Every way trains the same small network on the same batches with policy `sync` on two CPU ranks, and takes turns with
the others (turns.py). `table` writes the ratio of each way to the loop of the same round, with the interval of a
bootstrap over rounds. With `--without-outrider` the same ways train without it, in one process each: what a framework
costs by itself.

    python benchmarks/integration_cost.py run records.jsonl --rounds 100
    python benchmarks/integration_cost.py run alone.jsonl --rounds 100 --without-outrider
    SAMPLES=16384 BATCH=256 python benchmarks/integration_cost.py run longer.jsonl --rounds 40
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

SAMPLES, BATCH = int(os.environ.get("SAMPLES", "4096")), int(os.environ.get("BATCH", "64"))
WIDTH = 512
EPOCHS = int(os.environ.get("EPOCHS", "5"))
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
    model = Classifier()
    optimizer = sgd(model)
    if not options:
        for _ in range(EPOCHS):
            for batch in loader():
                model(**batch)["loss"].backward()
                nn.utils.clip_grad_norm_(model.parameters(), NORM)
                optimizer.step()
                optimizer.zero_grad()
        return
    import outrider

    with outrider.Session(**options) as s:
        s.prepare(model, optimizer)
        data = loader()
        for _ in range(EPOCHS):
            for batch in s.batches(data):
                s.backward(model(**batch)["loss"])
                nn.utils.clip_grad_norm_(model.parameters(), NORM)
                s.optimizer_step()


def trainer(options: dict[str, Any]) -> None:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=os.environ["OUTPUT"],
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
    if options:
        from outrider.integrations.huggingface import Trainer as OutriderTrainer

        OutriderTrainer(model=Classifier(), args=args, train_dataset=Rows(), session_options=options).train()
    else:
        Trainer(model=Classifier(), args=args, train_dataset=Rows()).train()


def accelerate(options: dict[str, Any]) -> None:
    if options:
        from outrider.integrations.accelerate import Accelerator

        accelerator: Any = Accelerator(session_options=options)
    else:
        import accelerate as library

        accelerator = library.Accelerator(cpu=True)
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

    strategy: Any = "auto"
    if options:
        from outrider.integrations.lightning import OutriderStrategy

        strategy = OutriderStrategy(**options)

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
        strategy=strategy,
        devices="auto" if options else 1,
        accelerator="cpu",
        max_epochs=EPOCHS,
        gradient_clip_val=NORM,
        enable_checkpointing=False,
        **quiet,
    ).fit(Module(), loader())


def fabric(options: dict[str, Any]) -> None:
    from lightning.fabric import Fabric

    if options:
        from outrider.integrations.lightning import OutriderFabricStrategy

        fabric = Fabric(accelerator="cpu", strategy=OutriderFabricStrategy(**options))
    else:
        fabric = Fabric(accelerator="cpu", devices=1)
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


def run(path: Path, rounds: int, *, with_outrider: bool) -> None:
    def command(way: str, folder: Path) -> list[str]:
        given = [] if with_outrider else ["--without-outrider"]
        return [sys.executable, "-W", "ignore", __file__, "one", way, str(folder / way), *given]

    ranks = turns.RANKS if with_outrider else 1
    found = turns.take_turns(list(WAYS), command, rounds=rounds, steps=SAMPLES // BATCH // ranks, ranks=ranks)
    with path.open("a") as file:
        for times in found:
            file.write(json.dumps(times, separators=(",", ":")) + "\n")


def table(path: Path) -> None:
    rounds = [json.loads(line) for line in path.read_text().splitlines()]
    own = sorted(times["loop"] for times in rounds)
    print(f"loop: {own[len(own) // 2]:.0f} ms per turn, {own[0]:.0f} to {own[-1]:.0f}\n")
    print("| way | time ÷ loop, median | 95 % interval | rounds |\n| --- | --- | --- | --- |")
    for way in list(WAYS)[1:]:
        print(f"| {way} | {turns.ratio_in_words(rounds, way, 'loop')} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table", "one"])
    parser.add_argument("path", help="the file of records; for one, the way")
    parser.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--without-outrider", action="store_true")
    wishes = parser.parse_args()
    if wishes.what == "run":
        run(Path(wishes.path), wishes.rounds, with_outrider=not wishes.without_outrider)
    elif wishes.what == "table":
        table(Path(wishes.path))
    else:
        options = {
            "policy": "sync",
            "devices": "cpu,cpu",
            "run_dir": wishes.folder,
            "quiet": True,
            "threads_per_rank": 1,
        }
        os.environ["OUTPUT"] = f"{wishes.folder}-out"
        torch.set_num_threads(1)
        WAYS[wishes.path]({} if wishes.without_outrider else options)


if __name__ == "__main__":
    main()
