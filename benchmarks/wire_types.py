"""What rounded averages cost in learning: the same runs in the lab with `wire` fp32, bf16 and int8.

Two replicas of speeds 1 and 0.4 in virtual time; a fixed random network labels the data, so that nothing is downloaded
and no sample is seen twice. Each seed is a block of runs with the same data, order and initial parameters. One JSON
line per run, then a table: loss, and the difference to fp32 by seed with its mean and interval (Student's t, 95 %).
This task is too insensitive to tell 8 bits without error feedback from fp32, see docs/log.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.average.wire_codec import WIRES
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench, train

SPEEDS = (1.0, 0.4)
BATCH, WIDTH, HIDDEN, CLASSES = 32, 32, 256, 10
# Student's t, 97.5 %, by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def teacher_data(num_samples: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and labels drawn from the probabilities of a fixed network."""
    weights = torch.Generator().manual_seed(1)
    hidden, out = torch.randn(WIDTH, 64, generator=weights), torch.randn(64, CLASSES, generator=weights)
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, WIDTH, generator=draw)
    logits = torch.tanh(inputs @ hidden / WIDTH**0.5) @ out
    return inputs, torch.multinomial(logits.softmax(1), 1, generator=draw).squeeze(1)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)
    )


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def cosine(optimizer: torch.optim.Optimizer, *, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def run(policy: str, wire: str, *, anchor: int, steps: int, seed: int, rate: float) -> dict[str, Any]:
    recipe = Recipe(
        model=make_model,
        optimizer=partial(torch.optim.Adam, lr=rate),
        scheduler=partial(cosine, steps=steps),
        step=loss,
        dataset=teacher_data(steps * BATCH, seed=seed + 10),
        batch_size=BATCH,
        steps=steps,
        evaluate=loss,
        eval_dataset=teacher_data(10_000, seed=5),
        seed=seed,
        policy=policy,
        wire=wire,
        anchor=anchor,
    )
    result = train(recipe, Bench(speeds=SPEEDS))
    return {
        "policy": policy,
        "wire": wire,
        "anchor": anchor,
        "steps": steps,
        "rate": rate,
        "seed": seed,
        "loss": result.points[-1].eval,
        "averages": result.averages,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["policy    anchor  wire   loss by seed                  less fp32, mean and interval"]
    for policy, anchor in dict.fromkeys((row["policy"], row["anchor"]) for row in rows):
        losses = {
            wire: [r["loss"] for r in rows if (r["policy"], r["anchor"], r["wire"]) == (policy, anchor, wire)]
            for wire in WIRES
        }
        for wire, found in losses.items():
            differences = [a - b for a, b in zip(found, losses["fp32"], strict=True)]
            listed = " ".join(f"{value:.4f}" for value in found)
            lines.append(f"{policy:<9} {anchor:>6}  {wire:<5}  {listed:<28}  {interval(differences)}")
    return "\n".join(lines)


def interval(differences: list[float]) -> str:
    if len(differences) < 2:
        return f"{differences[0]:+.2e}"
    half = STUDENT[len(differences) - 1] * statistics.stdev(differences) / math.sqrt(len(differences))
    return f"{statistics.mean(differences):+.2e} ± {half:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500, help="batches of both replicas together")
    parser.add_argument("--seeds", type=int, default=4, help="at most 10")
    parser.add_argument("--anchors", type=int, nargs="+", default=[2, 10])
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate of Adam")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with options.output.open("w") as file:
        for seed in range(options.seeds):
            for anchor in options.anchors:
                for policy in ("cadence", "async"):
                    for wire in WIRES:
                        row = run(policy, wire, anchor=anchor, steps=options.steps, seed=seed, rate=options.rate)
                        rows.append(row)
                        file.write(json.dumps(row) + "\n")
                        file.flush()
    print(table(rows))


if __name__ == "__main__":
    main()
