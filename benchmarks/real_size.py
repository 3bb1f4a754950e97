"""GPT-2 small, and a model of LoRA's shape, on two slices of one GPU: what every mode gives, needs and waits for.

GPT-2 small has 124 M parameters, all trained. LoRA's shape has 671 M frozen parameters in bfloat16 and 1.6 M trained
ones. `alone` is the larger slice by itself, `independent` both without averages, which is the ceiling. Rounds run all
modes one after the other, in an order that turns; a mode may have options of `train()` after it. Measured are samples
per second of all epochs but the first ones. `alone` and `independent` have nothing to find out and run two epochs. One
JSON line per run; `table` writes the ratio to `independent` of the same round, with the range over rounds. Needs a GPU
with MPS. A run still under way at the deadline is ended, and counts as far as it came.

    python benchmarks/real_size.py run records.jsonl --rounds 3
    python benchmarks/real_size.py run records.jsonl --slices cuda:0%40 cuda:0%20 --batch-sizes 128 256
    python benchmarks/real_size.py run records.jsonl --only gpt2 --batch-sizes 16 --sequences 14336 --epochs 2
    python benchmarks/real_size.py run records.jsonl --only gpt2 --batch-sizes 16 --epochs 4 \
        --modes independent "cadence cpu" "cadence cpu, overhead_target=0.05"
    python benchmarks/real_size.py run records.jsonl --slices cuda:0%25 cuda:0%12 --batch-sizes 512 --micro-batch 64 \
        --execution eager --sequences 2048 --epochs 4 --uncounted 2 --modes alone "balanced nccl"
    python benchmarks/real_size.py table records.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rounds import make_parser, take_rounds
from torch import Tensor, nn
from torch.nn import functional as F

import outrider
from outrider.bench.models.text_models import GPT2_CONTEXT, Gpt2, gpt2_small, next_symbol_loss
from outrider.errors import ConfigError, OutriderError
from outrider.timeline.timeline_files import read_record

Epochs = Sequence[dict[str, Any]]

SLICES = ("cuda:0%60", "cuda:0%25")
EPOCHS = 3
SEQUENCES = 4_096
"""Of an epoch of GPT-2 small."""


class LoraShape(nn.Module):
    """Frozen layers in bfloat16, each with a small trained one beside it."""

    def __init__(self, *, width: int = 2_048, num_layers: int = 20, rank: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(width, 4 * width), (4 * width, width)]
        self.frozen = nn.ModuleList(
            nn.Linear(*size, bias=False, dtype=torch.bfloat16) for _ in range(num_layers) for size in sizes
        ).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(num_layers))
        self.up = nn.ModuleList(nn.Linear(rank, 4 * width, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer, (down, up) in enumerate(zip(self.down, self.up, strict=True)):
            hidden = F.gelu(self.frozen[2 * layer](x.bfloat16()).float() + up(down(x)))
            x = x + self.frozen[2 * layer + 1](hidden.bfloat16()).float()
        return x


def squared_error(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in parameters if p.requires_grad), 3e-4, betas=(0.9, 0.95))


def gpt2_task(batch_size: int, sequences: int = SEQUENCES) -> dict[str, Any]:
    tokens = torch.randint(0, 2_000, (sequences, GPT2_CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    return {"model": gpt2_small, "step": next_symbol_loss, "dataset": (tokens,), "batch_size": batch_size}


def lora_task(batch_size: int, sequences: int = SEQUENCES) -> dict[str, Any]:
    """Has rows of its own: `sequences` are those of GPT-2."""
    rows = torch.randn(16_384, 2_048, generator=torch.Generator().manual_seed(1))
    return {"model": LoraShape, "step": squared_error, "dataset": (rows, rows.roll(1, 1)), "batch_size": batch_size}


def tiny_gpt() -> nn.Module:
    return Gpt2(num_tokens=2_000, width=32, num_heads=2, num_blocks=1)


def tiny_task(batch_size: int, sequences: int = SEQUENCES) -> dict[str, Any]:
    """To try this script out on CPU ranks."""
    task = gpt2_task(batch_size, sequences)
    return task | {"model": tiny_gpt, "dataset": (task["dataset"][0][:, :17],)}


TASKS = {"gpt2": gpt2_task, "lora": lora_task, "tiny": tiny_task}
MODES: dict[str, dict[str, Any]] = {
    "alone": {"policy": "sync"},
    "independent": {"policy": "independent"},
    **{
        f"{policy} {backend}": {"policy": policy, "backend": backend}
        for policy in ("async", "cadence", "balanced")
        for backend in ("nccl", "cpu")
    },
}
DEFAULT_MODES = {
    ("gpt2", 16): [name for name in MODES if not name.startswith("balanced")],
    ("lora", 64): [name for name in MODES if not name.startswith(("cadence", "balanced"))],
    **{
        ("gpt2", size): ["alone", "independent", "balanced nccl", "balanced cpu", "async nccl"]
        for size in (128, 256, 512)
    },
}
SETTLED = ("alone", "independent")
"""Modes with nothing to find out: the second of two epochs counts."""


def options_of(mode: str) -> dict[str, Any]:
    """Options of `train()`: "cadence cpu, overhead_target=0.05" is a mode and one more option."""
    name, *given = mode.split(", ")
    if name not in MODES or not all("=" in one for one in given):
        raise ConfigError(
            f"no mode {mode!r}; the modes are {', '.join(MODES)}", hint='add options as in "async cpu, anchor=20"'
        )
    return MODES[name] | {key: json.loads(value) for key, value in (one.split("=", 1) for one in given)}


def measure(
    task: str,
    batch_size: int,
    mode: str,
    *,
    slices: Sequence[str],
    sequences: int,
    epochs: int,
    uncounted: int,
    end_s: float,
    **options: Any,
) -> dict[str, Any]:
    """One run; what it has by `end_s`, a time of `time.monotonic()`, where it is not over by then."""
    is_settled, began_s = mode in SETTLED, time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"outrider-{os.getpid()}-") as folder:
        run = outrider.train(
            **TASKS[task](batch_size, sequences),
            **options_of(mode),
            **options,
            devices=list(slices[:1] if mode == "alone" else slices),
            optimizer=adamw,
            epochs=2 if is_settled else epochs,
            precision="bf16",
            threads_per_rank=2,
            run_dir=Path(folder) / "run",
            timeout_s=60,
            quiet=True,
        )
        await_end(run, end_s=end_s)
        record = read_record(run.run_dir) or {"epochs": []}
        counts = record["epochs"][1 if is_settled else uncounted :]
        if not counts:
            raise OutriderError(f"ended at the deadline after {len(record['epochs'])} epochs, of which none counts")
        events = json.loads((run.run_dir / "timeline.json").read_text())["events"]
    return facts_of(record["epochs"], counts, events) | {"wall_s": round(time.monotonic() - began_s, 1)}


def await_end(run: outrider.Run, *, end_s: float) -> None:
    """Wait for the end of a run, or end it; raises the error of a failed rank."""
    while run.is_running and time.monotonic() < end_s:
        run.poll()
        time.sleep(0.2)
    if run.is_running:
        run.close()
    else:
        run.join()


def facts_of(epochs: Epochs, counts: Epochs, events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ends = [event for event in events if event["kind"] == "average end"]
    return {
        "samples_per_s": round(rate_of(counts), 1),
        "first_epoch_samples_per_s": round(epochs[0]["samples_per_s"], 1),
        "epochs_samples_per_s": [round(epoch["samples_per_s"], 1) for epoch in epochs],
        "share": counts[-1]["share_by_rank"],
        "memory_mib": [round(own / 2**20) for own in counts[-1]["peak_memory_bytes_by_rank"]],
        "average_ms": round(median(event["ms"] for event in ends), 2) if ends else None,
        "averages": len(ends),
        "average_bytes": max((event["bytes"] for event in ends), default=None),
        "anchors": [[round(event["t"], 1), event["value"]] for event in events if event["kind"] == "anchor"],
        "exposed": round(mean(epoch["exposed_average_fraction"] for epoch in counts), 4),
        "waited": round(mean(epoch["wait_fraction"] for epoch in counts), 4),
        "execution": [event["value"] for event in events if event["kind"] == "execution"],
        "splits": [event["value"] for event in events if event["kind"] in ("split", "alone")],
    }


def rate_of(epochs: Epochs) -> float:
    rate: float = sum(epoch["samples"] for epoch in epochs) / sum(epoch["seconds"] for epoch in epochs)
    return rate


def run(wishes: argparse.Namespace) -> None:
    for mode in wishes.modes or ():
        options_of(mode)
    what = [
        (task, size, mode)
        for task in wishes.only
        for size in wishes.batch_sizes
        for mode in wishes.modes or DEFAULT_MODES.get((task, size), ())
    ]
    place = {} if tuple(wishes.slices) == SLICES else {"slices": wishes.slices}
    place |= {} if wishes.sequences == SEQUENCES else {"sequences": wishes.sequences}
    place |= {} if wishes.micro_batch is None else {"micro_batch": wishes.micro_batch}
    options = {} if wishes.micro_batch is None else {"micro_batch": wishes.micro_batch}
    options |= {} if wishes.execution is None else {"execution": wishes.execution}
    size = {"sequences": wishes.sequences, "epochs": wishes.epochs, "uncounted": wishes.uncounted}
    end_s = time.monotonic() + wishes.deadline
    wishes.seconds = min(wishes.seconds, wishes.deadline)
    take_rounds(
        wishes,
        what,
        describe=lambda one: {"task": one[0], "batch_size": one[1], "mode": one[2], **place},
        measure=lambda one: measure(*one, slices=wishes.slices, end_s=end_s, **size, **options),
        shift=wishes.shift,
    )


def table(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by = {(*setting_of(row), row["mode"], row["round"]): row for row in rows if "error" not in row}
    print(
        "| model | slices | batch size | mode | ÷ independent | range | rounds | ÷ alone | memory, MiB "
        "| ms per average | MB per average |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    for *setting, mode in dict.fromkeys(key[:4] for key in by):
        own = {key[4]: row for key, row in by.items() if key[:4] == (*setting, mode)}

        def ratios(other: str, own: dict[int, Any] = own, at: Sequence[Any] = setting) -> list[float]:
            there = [(row, by.get((*at, other, number))) for number, row in own.items()]
            return sorted(row["samples_per_s"] / one["samples_per_s"] for row, one in there if one is not None)

        ceiling, alone = ratios("independent"), ratios("alone")
        last = own[max(own)]
        cells = [
            *setting,
            mode,
            f"{mean(ceiling):.3f}" if ceiling else "",
            f"{ceiling[0]:.3f} to {ceiling[-1]:.3f}" if ceiling else "",
            len(own),
            f"{mean(alone):.2f}" if alone else "",
            ", ".join(map(str, last.get("memory_mib", ()))),
            "" if last["average_ms"] is None else last["average_ms"],
            f"{last['average_bytes'] / 1e6:.1f}" if last.get("average_bytes") else "",
        ]
        print("| " + " | ".join(map(str, cells)) + " |")


def setting_of(row: dict[str, Any]) -> tuple[str, str, int]:
    """What the rows have in common that may be compared."""
    parts = [name.split("%")[-1] for name in row.get("slices", SLICES)]
    longer = f", {row['sequences']:,} sequences" if "sequences" in row else ""
    pieces = f", micro-batches of {row['micro_batch']}" if "micro_batch" in row else ""
    return row["task"] + longer + pieces, " + ".join(parts) + " %", row["batch_size"]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=["gpt2", "lora"], choices=list(TASKS))
    parser.add_argument("--modes", nargs="+", help="default: those of the task, see DEFAULT_MODES")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[16, 64, 128])
    parser.add_argument("--micro-batch", type=int, help="samples computed at once; default: what fits")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="of an epoch of gpt2")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--uncounted", type=int, default=1, help="epochs at the start that do not count")
    parser.add_argument("--slices", nargs=2, default=list(SLICES), help="the larger first")
    parser.add_argument("--execution", help="eager saves the trial of captured steps; the default is train()'s")
    parser.add_argument("--shift", type=int, default=3, help="modes by which the order turns from round to round")
    parser.add_argument("--deadline", type=float, default=math.inf, help="end everything after this time, in seconds")
    wishes = parser.parse_args()
    if wishes.what == "run":
        run(wishes)
    else:
        table(wishes.path)


if __name__ == "__main__":
    main()
