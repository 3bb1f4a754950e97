"""Time to target in the lab: which defaults make averaging reach an accuracy sooner than the fast device alone?

Virtual clock, real MNIST, so the result does not depend on the machine. One JSON line per run, flushed as it ends;
runs already in the output file are skipped. See docs/log.md for what came of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.average.outer import Outer
from outrider.bench.datasets.mnist import mnist
from outrider.bench.models.classification import accuracy, cross_entropy_step
from outrider.bench.models.digits import lenet, mlp
from outrider.lab.train import Bench, train
from outrider.replica.recipe import Recipe

MODELS = {"mlp": (mlp, 0.975, 5), "lenet": (lenet, 0.985, 4)}
SPEEDS = (1.0, 0.4)


def grid(model: str) -> Iterator[dict[str, Any]]:
    for lr in (0.5, 1.0, 2.0, 4.0):
        yield {"policy": "solo", "lr": lr}
    for lr in (1.0, 2.0):
        yield {"policy": "balanced", "lr": lr}
        yield {"policy": "sync", "lr": lr}
    for policy, lr, momentum in itertools.product(("cadence", "async"), (1.0, 2.0), (None, 0.3, 0.5, 0.7)):
        yield {"policy": policy, "lr": lr, "anchor": 10, "momentum": momentum}
    for policy, anchor, momentum in itertools.product(("cadence", "async"), (4, 20, 50), (None, 0.5)):
        yield {"policy": policy, "lr": 1.0, "anchor": anchor, "momentum": momentum}
    for policy, momentum in itertools.product(("cadence", "async"), (None, 0.5)):
        yield {"policy": policy, "lr": 1.0, "anchor": 10, "momentum": momentum, "average_optimizer": True}
        yield {"policy": policy, "lr": 1.0, "anchor": 10, "momentum": momentum or 0.5, "kind": "slowmo"}


def run(model: str, setting: dict[str, Any], seed: int, data: Any) -> dict[str, Any]:
    make, target, epochs = MODELS[model]
    momentum = setting.get("momentum")
    recipe = Recipe(
        model=make,
        optimizer=partial(torch.optim.Adam, lr=setting["lr"] * 1e-3),
        step=cross_entropy_step,
        dataset=data.train,
        batch_size=64,
        epochs=epochs,
        policy="cadence" if setting["policy"] == "solo" else setting["policy"],
        evaluate=accuracy,
        eval_dataset=data.test,
        anchor=setting.get("anchor"),
        outer=Outer() if momentum is None else Outer(kind=setting.get("kind", "nesterov"), momentum=momentum),
        average_optimizer=setting.get("average_optimizer", False),
        seed=seed,
    )
    speeds = SPEEDS[:1] if setting["policy"] == "solo" else SPEEDS
    result = train(recipe, Bench(speeds=speeds), points_per_epoch=4)
    return {
        "model": model,
        **setting,
        "seed": seed,
        "target": target,
        "time_to_target": result.time_to(target),
        "final": result.points[-1].eval,
        "best": max(point.eval or 0.0 for point in result.points),
        "curve": [[round(point.time, 1), round(point.eval or 0.0, 4)] for point in result.points],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the MNIST files")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", default="mlp,lenet")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    done = set()
    if options.output.exists():
        records = [json.loads(line) for line in options.output.read_text().splitlines()]
        done = {_key(record, record["seed"]) for record in records}
    data = mnist(options.data)
    with options.output.open("a") as file:
        for seed, model in itertools.product(range(options.seeds), options.models.split(",")):
            for setting in grid(model):
                if _key({"model": model, **setting}, seed) in done:
                    continue
                record = run(model, setting, seed, data)
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
                file.flush()
                print({name: value for name, value in record.items() if name != "curve"}, flush=True)


def _key(record: dict[str, Any], seed: int) -> tuple[Any, ...]:
    names = ("model", "policy", "lr", "anchor", "momentum", "kind", "average_optimizer")
    return (seed, *(record.get(name) for name in names))


if __name__ == "__main__":
    main()
