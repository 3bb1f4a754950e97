"""GPT-2 small on a card of 24 GB beside one of 8 GB, at a batch that the small one cannot hold.

Two slices of one GPU with limits of memory stand for the cards. `auto` is `train()` without a number for memory; the
pairs are micro-batches chosen by hand, the best of which is what `auto` is measured by. DDP has the largest batch of
the list that fits both cards, since its ranks have equal ones. Rounds run all ways in an order that turns; measured are
samples per second of all epochs but the first. One JSON line per run; `table` writes ratios within a round. Needs a GPU
with MPS.

    python benchmarks/unequal_memory.py run records.jsonl --rounds 3
    python benchmarks/unequal_memory.py table records.jsonl
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rounds import make_parser, take_rounds

import outrider
from outrider.bench.models.text_models import GPT2_CONTEXT, gpt2_small, next_symbol_loss
from outrider.bench.modes import parse_mode, run_mode
from outrider.bench.tasks import Task
from outrider.errors import OutriderError
from outrider.machine.devices import parse_devices

DEVICES = "cuda:0%60:24GiB,cuda:0%25:8GiB"
BATCH_SIZE = 32
PAIRS = ((32, 8), (32, 12))
DDP_BATCHES = (16, 12, 8, 4)
EPOCHS = 3
COMMON: dict[str, Any] = {"precision": "bf16", "threads_per_rank": 2, "timeout_s": 120.0}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 3e-4, betas=(0.9, 0.95))


def tokens() -> tuple[torch.Tensor]:
    return (torch.randint(0, 2_000, (2_048, GPT2_CONTEXT + 1), generator=torch.Generator().manual_seed(0)),)


def with_train(policy: str, micro_batch: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix=f"outrider-{os.getpid()}-") as folder:
        run = outrider.train(
            model=gpt2_small,
            optimizer=adamw,
            step=next_symbol_loss,
            dataset=tokens(),
            batch_size=BATCH_SIZE,
            micro_batch=micro_batch,
            policy=policy,
            devices=DEVICES,
            epochs=EPOCHS,
            run_dir=Path(folder) / "run",
            quiet=True,
            **COMMON,
        )
        run.join()
        events = json.loads((run.run_dir / "timeline.json").read_text())["events"]
    sizes = [(event["rank"], event["value"], event["reason"]) for event in events if event["kind"] == "micro-batch"]
    return measured([vars_of(epoch) for epoch in run.epochs]) | {"micro_batches": sizes}


def with_ddp(batch_size: int) -> dict[str, Any]:
    task = Task(
        name="gpt2",
        data_name="random tokens",
        model=gpt2_small,
        optimizer=adamw,
        step=next_symbol_loss,
        dataset=tokens(),
        batch_size=batch_size,
        epochs=EPOCHS,
    )
    with tempfile.TemporaryDirectory(prefix=f"outrider-{os.getpid()}-") as folder:
        mode, devices = parse_mode("ddp", num_devices=2), parse_devices(DEVICES)
        result = run_mode(mode, task, devices=devices, run_dir=Path(folder) / "run", settings=COMMON)
    return measured([vars_of(epoch) for epoch in result.epochs]) | {"batch_size": batch_size}


def vars_of(epoch: Any) -> dict[str, Any]:
    return {name: getattr(epoch, name) for name in ("samples", "seconds", "peak_memory_bytes_by_rank")}


def measured(epochs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    settled = epochs[1:]
    return {
        "samples_per_s": sum(e["samples"] for e in settled) / sum(e["seconds"] for e in settled),
        "memory_mib": [round(own / 2**20) for own in epochs[-1]["peak_memory_bytes_by_rank"]],
    }


def one(way: str) -> dict[str, Any]:
    if way.startswith("ddp"):
        failed: list[str] = []
        for batch_size in DDP_BATCHES:
            try:
                return with_ddp(batch_size) | {"too_large": failed}
            except OutriderError as error:
                failed.append(f"{batch_size}: {str(error)[:120]}")
        return {"error": "; ".join(failed)}
    policy, _, pair = way.partition(" ")
    return with_train(policy, "auto" if pair == "auto" else tuple(int(size) for size in pair.split("+")))


WAYS = ("async auto", *(f"async {large}+{small}" for large, small in PAIRS), "ddp")


def table(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by = {(row["way"], row["round"]): row["samples_per_s"] for row in rows if "error" not in row}
    rounds = sorted({number for _, number in by})
    print("| way | samples/s | ÷ DDP | ÷ `auto` | rounds |\n| --- | --- | --- | --- | --- |")
    for way in WAYS:
        own = [number for number in rounds if (way, number) in by]
        if own:
            beside = ["ddp", "async auto"]
            texts = [_range([by[way, n] / by[other, n] for n in own if (other, n) in by]) for other in beside]
            print(f"| {way} | {mean(by[way, n] for n in own):.0f} | {' | '.join(texts)} | {len(own)} |")


def _range(ratios: Sequence[float]) -> str:
    return f"{mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


def main() -> None:
    wishes = make_parser(__doc__).parse_args()
    if wishes.what == "run":
        take_rounds(wishes, WAYS, describe=lambda way: {"way": way}, measure=one, shift=2)
    else:
        table(wishes.path)


if __name__ == "__main__":
    main()
