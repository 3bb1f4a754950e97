"""What a stream costs beside a map-style data set of the same samples, on several ranks.

Every rank reads the whole stream and skips the samples of the others. A sample is compressed; what differs is where it
is decoded: in the data set, also for samples that are skipped, or in `collate`, only for a rank's own batches. Rounds
run all four kinds one after the other, in an order that turns. One JSON line per run; `table` writes ratios of the
same round, stream to map-style, with the interval of a bootstrap over rounds.

    nice python benchmarks/stream_cost.py run records.jsonl --rounds 8
    python benchmarks/stream_cost.py table records.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

import outrider

SAMPLES, WIDTH, EPOCHS = 4_096, 1_024, 4
KINDS = ("map, decoded there", "stream, decoded there", "map, decoded in collate", "stream, decoded in collate")


def packed() -> list[bytes]:
    rng = np.random.default_rng(0)
    return [zlib.compress(rng.integers(0, 4, WIDTH, dtype=np.uint8).tobytes()) for _ in range(SAMPLES)]


def unpacked(sample: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(zlib.decompress(sample)), dtype=torch.uint8).float()


def collate_packed(samples: list[bytes]) -> torch.Tensor:
    return torch.stack([unpacked(sample) for sample in samples])


class Mapped:
    def __init__(self, samples: list[bytes], *, decodes: bool) -> None:
        self.samples = samples
        self.decodes = decodes

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return unpacked(self.samples[index]) if self.decodes else self.samples[index]


class Streamed(IterableDataset[Any]):
    def __init__(self, samples: list[bytes], *, decodes: bool) -> None:
        self.samples = samples
        self.decodes = decodes

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Any]:
        return (unpacked(sample) if self.decodes else sample for sample in self.samples)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-4)


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def measured(kind: str, devices: str) -> dict[str, Any]:
    """Samples per second, and processor seconds of all ranks, without the first epoch."""
    samples, decodes = packed(), kind.endswith("there")
    dataset = (Streamed if kind.startswith("stream") else Mapped)(samples, decodes=decodes)
    with tempfile.TemporaryDirectory() as folder:

        def keep_time(context: outrider.EpochContext) -> None:
            with (Path(folder) / f"rank{context.rank}").open("a") as file:
                file.write(f"{time.process_time()}\n")

        options: dict[str, Any] = {"shuffle": False, "collate": None if decodes else collate_packed}
        trained = outrider.train(
            make_model,
            make_optimizer,
            step,
            dataset,
            batch_size=32,
            epochs=EPOCHS,
            devices=devices,
            policy="cadence",
            threads_per_rank=1,
            run_dir=Path(folder) / "run",
            checkpoint_every=None,
            epoch_end=keep_time,
            execution="eager",
            **options,
        ).join()
        times = [[float(line) for line in path.read_text().split()] for path in sorted(Path(folder).glob("rank*"))]
    late = trained.epochs[1:]
    return {
        "kind": kind,
        "devices": devices,
        "samples_per_s": sum(epoch.samples for epoch in late) / sum(epoch.seconds for epoch in late),
        "processor_s": sum(own[-1] - own[0] for own in times),
        "torch": torch.__version__,
    }


def run(path: Path, rounds: int, devices: str) -> None:
    for number in range(rounds):
        turn = number % len(KINDS)
        for kind in (*KINDS[turn:], *KINDS[:turn]):
            line = json.dumps({"round": number, **measured(kind, devices)})
            with path.open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)


def interval(ratios: list[float]) -> tuple[float, float]:
    rng = random.Random(0)
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(2_000))
    return medians[50], medians[1_949]


def in_words(ratios: list[float]) -> str:
    low, high = interval(ratios)
    return f"{median(ratios):.3f} ({low:.3f} to {high:.3f})"


def table(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_round = {(row["devices"], row["round"], row["kind"]): row for row in rows}
    print("| devices | decoded | n | time of a stream ÷ map-style | processor time ÷ map-style |")
    print("| --- | --- | --- | --- | --- |")
    for devices in dict.fromkeys(row["devices"] for row in rows):
        for place in ("there", "in collate"):
            pairs = [
                (row, by_round[devices, row["round"], f"map, decoded {place}"])
                for row in rows
                if row["kind"] == f"stream, decoded {place}" and row["devices"] == devices
            ]
            wall = [other["samples_per_s"] / one["samples_per_s"] for one, other in pairs]
            busy = [one["processor_s"] / other["processor_s"] for one, other in pairs]
            cells = [
                f"{median(some):.3f} ({interval(some)[0]:.3f} to {interval(some)[1]:.3f})" for some in (wall, busy)
            ]
            print(f"| `{devices}` | {place} | {len(pairs)} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--devices", default="cpu,cpu@0.4")
    given = parser.parse_args()
    if given.command == "run":
        run(given.file, given.rounds, given.devices)
    else:
        table(given.file)
