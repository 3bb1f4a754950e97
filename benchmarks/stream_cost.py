"""What a stream costs beside a map-style data set of the same samples, on several ranks.

Every rank reads the whole stream and skips the samples of the others. A sample is compressed; what differs is where it
is decoded: in the data set, also for samples that are skipped, or in `collate`, only for a rank's own batches. All four
kinds train at once on two CPU ranks with policy `sync`, and take turns (turns.py). `table` writes ratios of the same
round, stream to map-style, with the interval of a bootstrap over rounds.

    python benchmarks/stream_cost.py run records.jsonl --rounds 100
    python benchmarks/stream_cost.py table records.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import turns
from torch import nn
from torch.utils.data import IterableDataset

import outrider

SAMPLES, WIDTH, BATCH = 4_096, 1_024, 32
KINDS = ("map-there", "stream-there", "map-in-collate", "stream-in-collate")


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
    turns.step()
    return model(batch).square().mean()


def train(kind: str, folder: str) -> None:
    samples, decodes = packed(), kind.endswith("there")
    dataset = (Streamed if kind.startswith("stream") else Mapped)(samples, decodes=decodes)
    outrider.train(
        make_model,
        make_optimizer,
        step,
        dataset,
        batch_size=BATCH,
        epochs=int(os.environ["EPOCHS"]),
        devices="cpu,cpu",
        policy="sync",
        threads_per_rank=1,
        run_dir=folder,
        checkpoint_every=None,
        execution="eager",
        quiet=True,
        shuffle=False,
        collate=None if decodes else collate_packed,
    ).join()


def run(path: Path, rounds: int) -> None:
    def command(kind: str, folder: Path) -> list[str]:
        return [sys.executable, __file__, "one", kind, str(folder / kind)]

    found = turns.take_turns(KINDS, command, rounds=rounds, steps=SAMPLES // BATCH // turns.RANKS)
    with path.open("a") as file:
        for times in found:
            file.write(json.dumps(times, separators=(",", ":")) + "\n")


def table(path: Path) -> None:
    rounds = [json.loads(line) for line in path.read_text().splitlines()]
    print("| samples are decoded | time of a stream ÷ map-style, median | 95 % interval | rounds |")
    print("| --- | --- | --- | --- |")
    for words, place in (("in the data set, also skipped ones", "there"), ("in `collate`", "in-collate")):
        print(f"| {words} | {turns.ratio_in_words(rounds, f'stream-{place}', f'map-{place}')} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table", "one"])
    parser.add_argument("path", help="the file of records; for one, the kind")
    parser.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=100)
    wishes = parser.parse_args()
    if wishes.what == "run":
        run(Path(wishes.path), wishes.rounds)
    elif wishes.what == "table":
        table(Path(wishes.path))
    else:
        train(wishes.path, wishes.folder)


if __name__ == "__main__":
    main()
