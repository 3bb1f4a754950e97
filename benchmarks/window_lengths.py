"""What short windows bring: loss and time with windows of 20 batches and up, and with tuned ones.

Two devices of speeds 1 and 0.4, in the lab or with `--real` as CPU ranks in interleaved rounds. A fixed random network
labels the data, so that nothing is downloaded and no sample is seen twice. One JSON line per run, see docs/log.md.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outrider
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench, train

SPEEDS = (1.0, 0.4)
AVERAGE_COST = 0.25
"""Of an average, in batches of the fast device."""
BATCH, WIDTH, CLASSES = 32, 32, 10
SETTINGS: dict[str, dict[str, Any]] = {
    "one device": {"speeds": SPEEDS[:1]},
    "one device, 1.4 times as long": {"speeds": SPEEDS[:1], "longer": 1.4},
    "cadence, 20 and up": {"policy": "cadence", "min_anchor": 20, "longer": 1.4},
    "cadence, tuned": {"policy": "cadence", "longer": 1.4},
    "async, 20 and up": {"policy": "async", "min_anchor": 20, "longer": 1.4},
    "async, tuned": {"policy": "async", "longer": 1.4},
}


def teacher_data(num_samples: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and labels drawn from the probabilities of a fixed network."""
    weights = torch.Generator().manual_seed(1)
    hidden, out = torch.randn(WIDTH, 64, generator=weights), torch.randn(64, CLASSES, generator=weights)
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, WIDTH, generator=draw)
    logits = torch.tanh(inputs @ hidden / WIDTH**0.5) @ out
    return inputs, torch.multinomial(logits.softmax(1), 1, generator=draw).squeeze(1)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.Tanh(), nn.Linear(128, CLASSES))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def cosine(optimizer: torch.optim.Optimizer, *, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def options_of(setting: dict[str, Any], steps: int, seed: int, *, rate: float) -> dict[str, Any]:
    """`steps` of the fast device are the time; `longer` is what all devices do in it."""
    total = round(steps * setting.get("longer", 1.0))
    return {
        "model": make_model,
        "optimizer": partial(torch.optim.Adam, lr=rate),
        "scheduler": partial(cosine, steps=total),
        "step": loss,
        "dataset": teacher_data(total * BATCH, seed=seed + 10),
        "batch_size": BATCH,
        "steps": total,
        "evaluate": loss,
        "eval_dataset": teacher_data(20_000, seed=5),
        "seed": seed,
        **{name: setting[name] for name in ("policy", "min_anchor") if name in setting},
    }


def run_for_real(name: str, steps: int, seed: int, *, rate: float) -> dict[str, Any]:
    """On CPU ranks; the rank of speed 0.4 is throttled."""
    setting = SETTINGS[name]
    devices = ["cpu", "cpu@0.4"][: len(setting.get("speeds", SPEEDS))]
    trained = outrider.train(**options_of(setting, steps, seed, rate=rate), devices=devices, threads_per_rank=1).join()
    last = trained.epochs[-1]
    return {
        "setting": name,
        "steps": steps,
        "rate": rate,
        "seed": seed,
        "loss": last.eval,
        "seconds": sum(epoch.seconds for epoch in trained.epochs),
        "averages": sum(epoch.averages for epoch in trained.epochs),
    }


def run(name: str, steps: int, seed: int, *, rate: float) -> dict[str, Any]:
    """In virtual time."""
    setting = SETTINGS[name]
    recipe = Recipe(**options_of(setting, steps, seed, rate=rate))
    result = train(recipe, Bench(speeds=setting.get("speeds", SPEEDS), average_cost=AVERAGE_COST))
    point = result.points[-1]
    anchors = [decision.details["anchor"] for decision in result.decisions if decision.kind == "plan"]
    return {
        "setting": name,
        "steps": steps,
        "rate": rate,
        "seed": seed,
        "loss": point.eval,
        "time": point.time,
        "averages": result.averages,
        "anchors": sorted(set(anchors)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate of Adam")
    parser.add_argument("--real", action="store_true", help="on CPU ranks, not in the lab")
    options = parser.parse_args()
    measure = run_for_real if options.real else run
    torch.set_num_threads(1)
    with options.output.open("a") as file:
        for steps in options.steps:
            for seed in range(options.seeds):
                for name in SETTINGS:
                    file.write(json.dumps(measure(name, steps, seed, rate=options.rate)) + "\n")
                    file.flush()


if __name__ == "__main__":
    main()
