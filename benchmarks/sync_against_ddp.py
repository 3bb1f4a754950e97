"""What a step of policy `sync` costs beside one of torch's DistributedDataParallel, at real size, on two CPU ranks.

Both train the same model on the same batches, in a loop of the user's own, and take turns (turns.py) of a few steps.
`table` writes the ratio of the same round, with the interval of a bootstrap over rounds.

    python benchmarks/sync_against_ddp.py run records.jsonl --model resnet34 --rounds 30
    python benchmarks/sync_against_ddp.py table records.jsonl
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
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = int(os.environ.get("STEPS", "4"))
"""Of each rank in a turn, which is an epoch."""
WAYS = ("ddp", "sync")


class Counted(nn.Module):
    """A model that takes turns, and returns its loss."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        turns.step()
        return self.loss(self.model, x, y)


def resnet34() -> tuple[Counted, TensorDataset, int]:
    from transformers import ResNetConfig, ResNetForImageClassification

    batch = 8
    numbers = torch.Generator().manual_seed(0)
    count = STEPS * turns.RANKS * batch
    data = TensorDataset(torch.randn(count, 3, 64, 64, generator=numbers), torch.randint(1000, (count,)))
    sizes = {"depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000, **sizes))
    return Counted(model, lambda model, x, y: F.cross_entropy(model(x).logits, y)), data, batch


def gpt2() -> tuple[Counted, TensorDataset, int]:
    from transformers import GPT2Config, GPT2LMHeadModel

    batch = 2
    tokens = torch.randint(50_257, (STEPS * turns.RANKS * batch, 64), generator=torch.Generator().manual_seed(0))
    model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))
    return Counted(model, lambda model, x, y: model(input_ids=x, labels=y).loss), TensorDataset(tokens, tokens), batch


def mlp() -> tuple[Counted, TensorDataset, int]:
    batch = 64
    numbers = torch.Generator().manual_seed(0)
    count = STEPS * turns.RANKS * batch
    data = TensorDataset(torch.randn(count, 512, generator=numbers), torch.randint(10, (count,)))
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return Counted(model, lambda model, x, y: F.cross_entropy(model(x), y)), data, batch


MODELS = {"mlp": mlp, "resnet34": resnet34, "gpt2": gpt2}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4)


def with_ddp(name: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model, data, batch = MODELS[name]()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = adamw(wrapped)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    for epoch in range(int(os.environ["EPOCHS"])):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=batch, sampler=sampler):
            wrapped(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.distributed.destroy_process_group()


def with_sync(name: str, folder: str) -> None:
    import outrider

    with outrider.Session(policy="sync", devices="cpu,cpu", run_dir=folder, quiet=True, threads_per_rank=1) as s:
        torch.manual_seed(0)
        model, data, batch = MODELS[name]()
        optimizer = adamw(model)
        s.prepare(model, optimizer)
        loader = DataLoader(data, batch_size=batch, shuffle=True)
        for _ in range(int(os.environ["EPOCHS"])):
            for x, y in s.batches(loader):
                s.step(model(x, y))


def run(path: Path, model: str, rounds: int) -> None:
    def command(way: str, folder: Path) -> list[str]:
        own = [__file__, "one", str(folder / way), "--model", model, "--way", way]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={turns.RANKS}"]
        return [sys.executable, *(torchrun if way == "ddp" else []), *own]

    for times in turns.take_turns(WAYS, command, rounds=rounds, steps=STEPS):
        with path.open("a") as file:
            file.write(json.dumps({"model": model, **times}, separators=(",", ":")) + "\n")


def table(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    print("| model | time of sync ÷ DDP, median | 95 % interval | rounds |\n| --- | --- | --- | --- |")
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        print(f"| {model} | {turns.ratio_in_words(own, 'sync', 'ddp')} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table", "one"])
    parser.add_argument("path", help="the file of records")
    parser.add_argument("--model", choices=MODELS, default="resnet34")
    parser.add_argument("--way", choices=WAYS, default="sync", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=30)
    wishes = parser.parse_args()
    if wishes.what == "run":
        run(Path(wishes.path), wishes.model, wishes.rounds)
    elif wishes.what == "table":
        table(Path(wishes.path))
    elif wishes.way == "ddp":
        with_ddp(wishes.model)
    else:
        with_sync(wishes.model, wishes.path)


if __name__ == "__main__":
    main()
