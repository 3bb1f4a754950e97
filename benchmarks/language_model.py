"""A GPT of 30 M parameters that learns Python on two slices of one GPU: loss against tokens and against seconds.

`corpus` makes the text: the sources in wheels of fixed versions, which it downloads and compares with their hashes; one
file in 25 is held out. A byte-level BPE of 8,192 tokens is trained on the rest. `run` trains every mode with the same
seeds, seed by seed, in an order that turns: `solo` is the larger slice alone, `ddp` is torch's DDP with half of the
batch on each slice, so that one of its steps is one of solo's; all others are `train()` at its defaults. The loss is
that of the held-out files, in nats per token, at the end of every epoch; seconds are those of training. One JSON line
per run. `table` writes how long each mode takes to the loss that solo ends with. Needs a GPU with MPS; `corpus` needs
pip and tokenizers.

    python benchmarks/language_model.py corpus tokens.npz
    python benchmarks/language_model.py run records.jsonl --corpus tokens.npz
    python benchmarks/language_model.py table records.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import outrider
from outrider.bench.models.text_models import CODE_TOKENS, GPT2_CONTEXT, gpt_of_code, next_symbol_loss
from outrider.bench.modes import parse_mode, run_mode
from outrider.bench.tasks import Task
from outrider.data.keyed import below
from outrider.errors import OutriderError
from outrider.machine.devices import parse_devices

WHEELS = {
    "Django-5.1.4-py3-none-any.whl": "236e023f021f5ce7dee5779de7b286565fdea5f4ab86bae5338e3f7b69896cf0",
    "networkx-3.4.2-py3-none-any.whl": "df5d4365b724cf81b8c6a7312509d0c22386097011ad1abe274afd5e9d3bbc5f",
    "sympy-1.13.3-py3-none-any.whl": "54612cf55a62755ee71824ce692986f23c88ffa77207b30c1368eda4a7060f73",
    "transformers-4.47.1-py3-none-any.whl": "d2f5d19bb6283cd66c893ec7e6d931d6370bbf1cc93633326ff1f41a40046c9c",
}
"""Files and their SHA-256."""
HELD_OUT = 25
"""One file in so many."""
WINDOW = GPT2_CONTEXT + 1
CHUNK = 4 * GPT2_CONTEXT + 1
"""Tokens of a sample, of which every epoch reads another window: an epoch has a quarter of the corpus."""
NUM_EVAL = 512
DEVICES = "cuda:0%60,cuda:0%25"
MODES = ("solo", "async", "cadence", "balanced", "auto", "ddp")
BATCH_SIZE = 32
RATE = 6e-4
TOLERANCE = 0.01
"""Of the loss that counts as reached."""
COMMON: dict[str, Any] = {"precision": "bf16", "threads_per_rank": 2, "timeout_s": 120.0, "max_grad_norm": 1.0}


# The corpus


def make_corpus(path: Path) -> None:
    """Write the tokens of both parts."""
    from tokenizers import ByteLevelBPETokenizer

    with tempfile.TemporaryDirectory(prefix=f"outrider-{os.getpid()}-") as folder:
        texts = list(source_texts(Path(folder)))
    parts = {
        "train": [text for number, text in enumerate(texts) if number % HELD_OUT],
        "test": texts[::HELD_OUT],
    }
    tokenizer = ByteLevelBPETokenizer()
    options: dict[str, Any] = {"vocab_size": CODE_TOKENS, "special_tokens": ["<file>"], "show_progress": False}
    tokenizer.train_from_iterator(parts["train"], **options)
    tokens = {}
    for name, own in parts.items():
        encoded = tokenizer.encode_batch(own)
        tokens[name] = np.concatenate([np.array([0, *one.ids], dtype=np.int16) for one in encoded])
        print(f"{name}: {len(own)} files, {sum(map(len, own)):,} characters, {len(tokens[name]):,} tokens")
    np.savez_compressed(path, **tokens)


def source_texts(folder: Path) -> Iterator[str]:
    names = [name.rsplit("-py3", 1)[0].replace("-", "==", 1) for name in WHEELS]
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *names], check=True)
    seen = set()
    for wheel, expected in WHEELS.items():
        found = hashlib.sha256((folder / wheel).read_bytes()).hexdigest()
        if found != expected:
            raise SystemExit(f"{wheel} has SHA-256 {found}, expected {expected}")
        with zipfile.ZipFile(folder / wheel) as archive:
            for name in sorted(archive.namelist()):
                content = archive.read(name) if name.endswith(".py") else b""
                if len(content) >= 200 and content not in seen:
                    seen.add(content)
                    yield content.decode("utf-8")


def read_corpus(path: Path, *, limit: int | None) -> tuple[tuple[Tensor], tuple[Tensor]]:
    """Chunks to train with and windows to evaluate."""
    with np.load(path) as parts:
        train, test = (torch.from_numpy(parts[name]) for name in ("train", "test"))
    chunks = train.unfold(0, CHUNK, CHUNK - 1).contiguous()
    windows = test.unfold(0, WINDOW, WINDOW - 1)
    spread = torch.linspace(0, len(windows) - 1, NUM_EVAL).long()
    return (chunks[:limit],), (windows[spread].contiguous(),)


# Training


def any_window(batch: Sequence[Tensor], keys: Tensor) -> tuple[Tensor]:
    """A random window of each chunk."""
    (chunks,) = batch
    starts = below(keys, 0, CHUNK - WINDOW + 1)
    return (chunks.gather(1, starts[:, None] + torch.arange(WINDOW, device=chunks.device)),)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, RATE, betas=(0.9, 0.95), weight_decay=0.1)


def part_of_rate(tick: int, *, ticks: int) -> float:
    """Up over a twentieth of the run, then down along a cosine to a tenth."""
    warm_up = ticks / 20
    if tick < warm_up:
        return (tick + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (tick - warm_up) / (ticks - warm_up))))


def schedule(optimizer: torch.optim.Optimizer, *, ticks: int) -> LambdaLR:
    return LambdaLR(optimizer, partial(part_of_rate, ticks=ticks))


def train_once(mode: str, seed: int, *, corpus: Path, epochs: int, limit: int | None) -> dict[str, Any]:
    dataset, eval_dataset = read_corpus(corpus, limit=limit)
    batch_size = BATCH_SIZE // 2 if mode == "ddp" else BATCH_SIZE
    ticks = epochs * len(dataset[0]) // batch_size
    task: dict[str, Any] = {
        "model": gpt_of_code,
        "optimizer": adamw,
        "step": next_symbol_loss,
        "dataset": dataset,
        "augment": any_window,
        "batch_size": batch_size,
        "epochs": epochs,
        "seed": seed,
        "scheduler": partial(schedule, ticks=ticks),
        "evaluate": next_symbol_loss,
        "eval_dataset": eval_dataset,
    }
    with tempfile.TemporaryDirectory(prefix=f"outrider-{os.getpid()}-") as folder:
        run_dir = Path(folder) / "run"
        if mode == "ddp":
            named = Task(name="gpt", data_name="Python sources", **task)
            devices = parse_devices(DEVICES)
            epochs_done = run_mode(
                parse_mode("ddp", num_devices=2), named, devices=devices, run_dir=run_dir, settings=COMMON
            ).epochs
        else:
            place = {"devices": DEVICES, "policy": mode}
            if mode == "solo":
                place = {"devices": DEVICES.split(",")[0], "policy": "sync"}
            run = outrider.train(**task, **place, **COMMON, run_dir=run_dir, quiet=True)
            run.join()
            epochs_done = run.epochs
    return {
        "seconds": [round(epoch.seconds, 3) for epoch in epochs_done],
        "samples": [epoch.samples for epoch in epochs_done],
        "loss": [round(epoch.eval, 5) for epoch in epochs_done],
    }


def run(wishes: argparse.Namespace) -> None:
    deadline_s = time.monotonic() + wishes.limit_s
    for number, seed in enumerate(wishes.seeds):
        first = number * 2 % len(wishes.modes)
        for mode in (*wishes.modes[first:], *wishes.modes[:first]):
            if time.monotonic() > deadline_s:
                return
            line: dict[str, Any] = {"mode": mode, "seed": seed}
            try:
                line |= train_once(mode, seed, corpus=wishes.corpus, epochs=wishes.epochs, limit=wishes.samples)
            except OutriderError as error:
                line["error"] = str(error)[:500]
            with wishes.path.open("a") as file:
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
            print(line, flush=True)


# The table


def seconds_to(loss: float, record: dict[str, Any]) -> float | None:
    """Seconds of training until the held-out loss is reached, straight between two evaluations; None if it is not."""
    spent_s, before = 0.0, None
    for seconds, own in zip(record["seconds"], record["loss"], strict=True):
        if own <= loss:
            part = 1.0 if before is None else (before - loss) / (before - own)
            return spent_s + part * seconds
        spent_s, before = spent_s + seconds, own
    return None


def loss_after(seconds: float, record: dict[str, Any]) -> float:
    """The held-out loss after so many seconds of training, straight between two evaluations."""
    ends = np.cumsum(record["seconds"])
    return float(np.interp(seconds, ends, record["loss"]))


def interval(values: Sequence[float]) -> str:
    """The mean, and of several values the 95 % interval of Student's t."""
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else ""
    t = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}.get(len(values), 2.0)
    half = t * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return f"{np.mean(values):.3f} ± {half:.3f}"


COLUMNS = (
    "mode",
    "seeds",
    "tokens/s ÷ solo",
    "last loss",
    "− solo's after the same tokens",
    "− solo's after the same seconds",
    f"time to solo's last loss + {TOLERANCE:.0%}, solo ÷ mode",
)


def table(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by = {(row["mode"], row["seed"]): row for row in rows if "error" not in row}
    print("| " + " | ".join(COLUMNS) + " |\n| --- |" + " ---: |" * (len(COLUMNS) - 1))
    for mode in dict.fromkeys(mode for mode, _ in by):
        pairs = [(row, by["solo", seed]) for (own, seed), row in by.items() if own == mode and ("solo", seed) in by]
        gains = [gain for own, solo in pairs if (gain := gain_of(own, solo)) is not None]
        cells = [
            mode,
            str(len(pairs)),
            interval([rate_of(own) / rate_of(solo) for own, solo in pairs]),
            interval([own["loss"][-1] for own, _ in pairs]),
            interval([own["loss"][-1] - solo["loss"][-1] for own, solo in pairs]),
            interval([apart_in_time(own, solo) for own, solo in pairs]),
            interval(gains) if len(gains) == len(pairs) else f"reached by {len(gains)} of {len(pairs)}",
        ]
        print("| " + " | ".join(cells) + " |")


def rate_of(record: dict[str, Any]) -> float:
    return float(sum(record["samples"]) / sum(record["seconds"]))


def gain_of(own: dict[str, Any], solo: dict[str, Any]) -> float | None:
    """How much sooner a run has the loss that solo ends with; None if it never has."""
    target = (1 + TOLERANCE) * solo["loss"][-1]
    own_s, solo_s = seconds_to(target, own), seconds_to(target, solo)
    return None if own_s is None or solo_s is None else solo_s / own_s


def apart_in_time(own: dict[str, Any], solo: dict[str, Any]) -> float:
    """Its loss less solo's, after the seconds of the shorter of the two."""
    seconds = min(sum(own["seconds"]), sum(solo["seconds"]))
    return loss_after(seconds, own) - loss_after(seconds, solo)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("corpus", "table"):
        commands.add_parser(name).add_argument("path", type=Path)
    running = commands.add_parser("run")
    running.add_argument("path", type=Path)
    running.add_argument("--corpus", type=Path, required=True)
    running.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    running.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    running.add_argument("--epochs", type=int, default=6)
    running.add_argument("--samples", type=int, help="chunks of the corpus; all by default")
    running.add_argument("--limit-s", type=float, default=1e9, help="start no run after so many seconds")
    wishes = parser.parse_args()
    if wishes.command == "corpus":
        make_corpus(wishes.path)
    elif wishes.command == "run":
        run(wishes)
    else:
        table(wishes.path)


if __name__ == "__main__":
    main()
