"""What a framework costs beside a loop of one's own in a `Session`: the same steps, several ways.

Every way trains the same small network on the same batches with policy `sync` on two CPU ranks. Rounds run all ways
one after the other, in an order that turns. Measured are samples per second of all epochs but the first, as the run
records them. One JSON line per run; `table` writes the ratio of each way to the loop of the same round, with the
interval of a bootstrap over rounds.

    nice python benchmarks/integration_cost.py run records.jsonl --rounds 6
    python benchmarks/integration_cost.py table records.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

EPOCHS, SAMPLES, BATCH, WIDTH = 5, 4_096, 64, 512


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
                s.step(model(**batch)["loss"])


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
        max_grad_norm=0.0,
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
            optimizer.step()
            optimizer.zero_grad()


WAYS: dict[str, Callable[[dict[str, Any]], None]] = {
    "loop": loop,
    "trainer": trainer,
    "accelerate": accelerate,
    "lightning": lightning,
    "fabric": fabric,
}


def measure(way: str, folder: Path) -> dict[str, float]:
    """Samples per second without the first epoch, by the record of the run."""
    command = [sys.executable, "-W", "ignore", __file__, "one", way, str(folder / way)]
    variables = {**os.environ, "OUTRIDER_DEVICES": "cpu,cpu", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    if ended.returncode:
        raise SystemExit(f"{way}: {ended.stderr[-2000:]}")
    record = json.loads((folder / way / "record.json").read_text())
    epochs = record["epochs"][1:]
    assert sum(epoch["samples"] for epoch in epochs) == SAMPLES * (EPOCHS - 1), record["epochs"]
    return {
        "samples_per_s": sum(epoch["samples"] for epoch in epochs) / sum(epoch["seconds"] for epoch in epochs),
        "waiting": mean(epoch["wait_fraction"] for epoch in epochs),
    }


def run(path: Path, rounds: int) -> None:
    names = list(WAYS)
    for number in range(rounds):
        for way in names[number % len(names) :] + names[: number % len(names)]:
            with tempfile.TemporaryDirectory(prefix=f"outrider-{os.getpid()}-") as folder:
                found = measure(way, Path(folder))
            line = {"round": number, "way": way, "load": os.getloadavg()[0], "at_s": round(time.time()), **found}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)


def table(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by = {(row["round"], row["way"]): row["samples_per_s"] for row in rows}
    rounds = sorted({number for number, way in by if way == "loop"})
    print("| way | samples per second ÷ loop | 95 % interval | rounds |\n| --- | --- | --- | --- |")
    for way in list(WAYS)[1:]:
        ratios = [by[number, way] / by[number, "loop"] for number in rounds if (number, way) in by]
        numbers = random.Random(0)
        drawn = sorted(mean(numbers.choices(ratios, k=len(ratios))) for _ in range(10_000))
        print(f"| {way} | {mean(ratios):.3f} | {drawn[249]:.3f} to {drawn[9749]:.3f} | {len(ratios)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table", "one"])
    parser.add_argument("path", help="the file of records; for one, the way")
    parser.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=6)
    wishes = parser.parse_args()
    if wishes.what == "run":
        run(Path(wishes.path), wishes.rounds)
    elif wishes.what == "table":
        table(Path(wishes.path))
    else:
        WAYS[wishes.path]({"policy": "sync", "run_dir": wishes.folder, "quiet": True, "seed": 0, "threads_per_rank": 1})


if __name__ == "__main__":
    main()
