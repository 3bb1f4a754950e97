"""GPT-2 small, and a model of LoRA's shape, on two slices of one GPU: what every mode gives, needs and waits for.

GPT-2 small has 124 M parameters, all trained. LoRA's shape has 671 M frozen parameters in bfloat16 and 1.6 M trained
ones. `alone` is the larger slice by itself, `independent` both without averages, which is the ceiling. Rounds run all
modes one after the other, in an order that turns. Measured are samples per second of all epochs but the first. One
JSON line per run; `table` writes the ratio to `independent` of the same round, with the range over rounds. Needs a GPU
with MPS.

    python benchmarks/real_size.py run records.jsonl --rounds 3
    python benchmarks/real_size.py run records.jsonl --slices cuda:0%40 cuda:0%20 --batch-sizes 128 256
    python benchmarks/real_size.py run records.jsonl --only gpt2 --batch-sizes 16 --sequences 14336 --epochs 2
    python benchmarks/real_size.py table records.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rounds import make_parser, take_rounds
from torch import Tensor, nn
from torch.nn import functional as F

import outrider
from outrider.bench.models.text_models import GPT2_CONTEXT, gpt2_small, next_symbol_loss

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


TASKS = {"gpt2": gpt2_task, "lora": lora_task}
MODES: dict[str, dict[str, Any]] = {
    "alone": {"policy": "sync"},
    "independent": {"policy": "independent"},
    **{
        f"{policy} {backend}": {"policy": policy, "backend": backend}
        for policy in ("async", "cadence", "balanced")
        for backend in ("nccl", "cpu")
    },
}
WHAT = [("gpt2", 16, name) for name in MODES if not name.startswith("balanced")]
WHAT += [("lora", 64, name) for name in MODES if not name.startswith(("cadence", "balanced"))]
WHAT += [
    ("gpt2", size, name)
    for size in (128, 256)
    for name in ("alone", "independent", "balanced nccl", "balanced cpu", "async nccl")
]


def measure(
    task: str, batch_size: int, mode: str, *, slices: Sequence[str], sequences: int, epochs: int, **options: Any
) -> dict[str, Any]:
    devices = slices[:1] if mode == "alone" else slices
    with tempfile.TemporaryDirectory(prefix=f"outrider-{os.getpid()}-") as folder:
        run = outrider.train(
            **TASKS[task](batch_size, sequences),
            **MODES[mode],
            **options,
            devices=list(devices),
            optimizer=adamw,
            epochs=epochs,
            precision="bf16",
            threads_per_rank=2,
            run_dir=Path(folder) / "run",
            timeout_s=120,
            quiet=True,
        )
        run.join()
        record = json.loads((run.run_dir / "record.json").read_text())
        events = json.loads((run.run_dir / "timeline.json").read_text())["events"]
    first, *settled = record["epochs"]
    averages = [event["ms"] for event in events if event["kind"] == "average end"]
    counted = [event["bytes"] for event in events if event["kind"] == "average end"]
    return {
        "samples_per_s": sum(e["samples"] for e in settled) / sum(e["seconds"] for e in settled),
        "first_epoch_samples_per_s": first["samples_per_s"],
        "share": settled[-1]["share_by_rank"],
        "memory_mib": [round(own / 2**20) for own in settled[-1]["peak_memory_bytes_by_rank"]],
        "average_ms": round(median(averages), 2) if averages else None,
        "averages": len(averages),
        "average_bytes": max(counted, default=None),
        "exposed": round(mean(e["exposed_average_fraction"] for e in settled), 4),
        "execution": [event["value"] for event in events if event["kind"] == "execution"],
    }


def run(wishes: argparse.Namespace) -> None:
    what = [one for one in WHAT if one[0] in wishes.only and one[1] in wishes.batch_sizes and one[2] in wishes.modes]
    options = {} if wishes.overhead_target is None else {"overhead_target": wishes.overhead_target}
    suffix = "".join(f", {name}={value}" for name, value in options.items())
    place = {} if tuple(wishes.slices) == SLICES else {"slices": wishes.slices}
    place |= {} if wishes.sequences == SEQUENCES else {"sequences": wishes.sequences}
    size = {"sequences": wishes.sequences, "epochs": wishes.epochs}
    take_rounds(
        wishes,
        what,
        describe=lambda one: {"task": one[0], "batch_size": one[1], "mode": one[2] + suffix, **place},
        measure=lambda one: measure(*one, slices=wishes.slices, **size, **options),
        shift=3,
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
    return row["task"] + longer, " + ".join(parts) + " %", row["batch_size"]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[16, 64, 128])
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="of an epoch of gpt2")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--slices", nargs=2, default=list(SLICES), help="the larger first")
    parser.add_argument("--overhead-target", type=float, help="of the modes that average; the default is train()'s")
    wishes = parser.parse_args()
    if wishes.what == "run":
        run(wishes)
    else:
        table(wishes.path)


if __name__ == "__main__":
    main()
