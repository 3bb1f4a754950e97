"""Time to target in the lab: which defaults make averaging reach an accuracy sooner than the fast device alone?

Virtual clock, real MNIST, so the result does not depend on the machine. One JSON line per run, flushed as it ends;
runs already in the output file are skipped. See docs/log.md for what came of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from outrider.average.outer import Outer
from outrider.bench.datasets.mnist import mnist
from outrider.bench.models.image_models import accuracy, cross_entropy_step, lenet, mlp
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench, train

SPEEDS = (1.0, 0.4)
AVERAGE_COST = 0.25
"""Of one average of parameters, in batches of the fast device; shared steps are free here, so 1.40 is their limit."""
MODELS = {
    "mlp": (mlp, partial(torch.optim.Adam, lr=1e-3), 0.975, 5),
    "lenet": (lenet, partial(torch.optim.Adam, lr=1e-3), 0.985, 4),
    "mlp-sgd": (mlp, partial(torch.optim.SGD, lr=0.05, momentum=0.9), 0.975, 5),
}
"""Model, optimizer with the learning rate of grid point 1, target, epochs."""
OUTERS: dict[str, Any] = {
    "auto": "auto",
    "none": Outer(),
    "nesterov auto": Outer(kind="nesterov"),
    "nesterov 0.5": Outer(kind="nesterov", momentum=0.5),
    "nesterov 0.7": Outer(kind="nesterov", momentum=0.7),
    "sum": Outer(kind="slowmo", lr=1.69, momentum=0.0),
}
"""`sum` applies every rank's displacement in full at once, which `nesterov auto` does in the long run."""
RATES = (0.5, 1.0, 2.0, 4.0)


def grid(name: str) -> Iterator[dict[str, Any]]:
    """`defaults` holds the defaults against solo and balanced; `wide` is the search that led to them."""
    for lr in RATES:
        yield {"policy": "solo", "lr": lr}
        yield {"policy": "balanced", "lr": lr}
    if name == "defaults":
        for policy, lr in itertools.product(("cadence", "async"), RATES):
            yield {"policy": policy, "lr": lr, "anchor": 10, "outer": "auto"}
        for policy, lr in itertools.product(("cadence", "async"), (1.0, 2.0)):
            yield {"policy": policy, "lr": lr, "anchor": None, "outer": "auto"}
        for lr in RATES[:3]:
            yield {"policy": "cadence", "lr": lr, "anchor": 10, "outer": "none"}
        return
    for lr in RATES[1:]:
        yield {"policy": "sync", "lr": lr}
    for anchor, outer, lr in itertools.product((2, 5, 10, 20), list(OUTERS)[1:], RATES[1:]):
        yield {"policy": "cadence", "lr": lr, "anchor": anchor, "outer": outer}
    for anchor, outer, lr in itertools.product((5, 20), ("none", "nesterov auto", "nesterov 0.5"), (1.0, 2.0)):
        yield {"policy": "async", "lr": lr, "anchor": anchor, "outer": outer}
    for anchor, outer, lr in itertools.product((5, 20), ("none", "nesterov auto"), (1.0, 2.0)):
        yield {"policy": "cadence", "lr": lr, "anchor": anchor, "outer": outer, "average_optimizer": True}


def run(model: str, setting: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    make, optimizer, target, epochs = MODELS[model]
    data = mnist(folder)
    recipe = Recipe(
        model=make,
        optimizer=partial(optimizer, lr=optimizer.keywords["lr"] * setting["lr"]),
        step=cross_entropy_step,
        dataset=data.train,
        batch_size=64,
        epochs=epochs,
        policy="cadence" if setting["policy"] == "solo" else setting["policy"],
        evaluate=accuracy,
        eval_dataset=data.test,
        anchor=setting.get("anchor"),
        outer=OUTERS[setting.get("outer", "none")],
        lr_scale="auto" if setting.get("outer") == "auto" else 1.0,
        average_optimizer=setting.get("average_optimizer", False),
        seed=seed,
    )
    speeds = SPEEDS[:1] if setting["policy"] == "solo" else SPEEDS
    is_shared = setting["policy"] in ("sync", "balanced")
    result = train(recipe, Bench(speeds=speeds, average_cost=0.0 if is_shared else AVERAGE_COST), points_per_epoch=4)
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
    parser.add_argument("--models", default="mlp,lenet,mlp-sgd")
    parser.add_argument("--grid", choices=["defaults", "wide"], default="defaults")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    done = set()
    if options.output.exists():
        records = [json.loads(line) for line in options.output.read_text().splitlines()]
        done = {_key(record["model"], record, record["seed"]) for record in records}
    tasks = [
        (model, setting, seed)
        for seed, setting, model in itertools.product(
            range(options.seeds), grid(options.grid), options.models.split(",")
        )
        if _key(model, setting, seed) not in done
    ]
    with options.output.open("a") as file, ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(run, *task, options.data) for task in tasks]
        for future in as_completed(futures):
            file.write(json.dumps(future.result(), separators=(",", ":")) + "\n")
            file.flush()


def _key(model: str, setting: dict[str, Any], seed: int) -> tuple[Any, ...]:
    names = ("policy", "lr", "anchor", "outer", "average_optimizer")
    return (model, seed, *(setting.get(name) for name in names))


if __name__ == "__main__":
    main()
