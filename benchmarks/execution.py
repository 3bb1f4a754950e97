"""What a step of ResNet-20 takes on one GPU, by execution, precision, memory format and optimizer; and torch's own DDP.

Data stay on the device, crop and flip are part of the step; the images are random, since only time is measured.
One JSON line per case: milliseconds per step, the median of rounds. `python benchmarks/execution.py`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from outrider.bench.datasets.cifar10 import crop_and_flip, normalised
from outrider.bench.models.image_models import resnet
from outrider.data.feed import Feed, make_feed
from outrider.data.order import shuffled
from outrider.data.packed_batch import packed_batch_of
from outrider.policy.effects import Batch
from outrider.replica.execution import choose_execution
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica

NUM_SAMPLES = 50_000
ROUNDS = 3
EAGER = {"execution": "eager", "fused_optimizer": False}
FAST = {"precision": "bf16", "memory_format": "channels_last"}
# What tf32 sets stays set, so those cases come last.
CASES: tuple[dict[str, Any], ...] = (
    EAGER,
    {"execution": "eager"},
    {**EAGER, **FAST},
    {"execution": "graph", "fused_optimizer": False, "memory_format": "contiguous"},
    {"execution": "graph", "memory_format": "contiguous"},
    {"execution": "graph", "memory_format": "channels_last"},
    {"execution": "graph", "precision": "bf16", "memory_format": "contiguous"},
    {"execution": "graph", **FAST},
    {"execution": "graph", "optimizer": "adam", "fused_optimizer": False, **FAST},
    {"execution": "graph", "optimizer": "adam", **FAST},
    {"execution": "eager", "optimizer": "adam", "fused_optimizer": False},
    {"execution": "eager", "optimizer": "adam"},
    {"execution": "compile", **FAST},
    {"execution": "graph", "tf32": True},
    {"execution": "graph", "tf32": False},
)
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adam": partial(torch.optim.Adam, lr=1e-3),
}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(normalised(batch[0])), batch[1])


def random_images() -> tuple[Tensor, Tensor]:
    images = torch.randint(0, 256, (NUM_SAMPLES, 3, 32, 32), dtype=torch.uint8)
    return images, torch.randint(0, 10, (NUM_SAMPLES,))


def open_feed(device: torch.device) -> Feed:
    feed = make_feed(random_images(), device=device, seed=0, augment=crop_and_flip)
    feed.start_epoch(shuffled(NUM_SAMPLES, seed=0, epoch=0), 0)
    return feed


def batches(batch_size: int) -> Iterator[Batch]:
    while True:
        for start in range(0, NUM_SAMPLES - batch_size, batch_size):
            yield Batch(start, batch_size)


def ms_per_step(step: Callable[[Batch], None], *, batch_size: int, steps: int) -> list[float]:
    """Per round; the first few steps are not timed."""
    coming = batches(batch_size)
    for _ in range(10):
        step(next(coming))
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        for _ in range(steps):
            step(next(coming))
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - started_s) * 1e3 / steps)
    return rounds


def replica_case(case: dict[str, Any], feed: Feed, device: torch.device, batch_size: int) -> dict[str, Any]:
    options = {"optimizer": "sgd", "memory_format": "contiguous", **case}
    options["optimizer"] = OPTIMIZERS[options["optimizer"]]
    recipe = Recipe(model=resnet, step=loss_of, dataset=[0], batch_size=batch_size, **options)
    replica = Replica(recipe, device=device, rank=0, name=str(device))
    first = Batch(0, batch_size)
    decision = choose_execution(
        replica, lambda: packed_batch_of(feed, first), samples=batch_size, on_decision=lambda decision: print(decision)
    )

    def step(batch: Batch) -> None:
        replica.step(packed_batch_of(feed, batch), samples=batch.count, at=0)

    rounds = ms_per_step(step, batch_size=batch_size, steps=40 if replica.captured is None else 150)
    return {"case": case, "value": decision.value, "reason": decision.reason, "rounds_ms": rounds}


def ddp_case(feed: Feed, device: torch.device, batch_size: int) -> dict[str, Any]:
    """torch's own loop, one rank."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29513")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=device)
    model = nn.parallel.DistributedDataParallel(resnet().to(device), device_ids=[device.index])
    optimizer = OPTIMIZERS["sgd"](model.parameters())

    def step(batch: Batch) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, feed.fetch(batch)).backward()
        optimizer.step()

    rounds = ms_per_step(step, batch_size=batch_size, steps=40)
    dist.destroy_process_group()
    return {"case": {"execution": "torch DDP"}, "value": "eager", "reason": "", "rounds_ms": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--only", default="", help="cases whose JSON has this text")
    arguments = parser.parse_args()
    batch_size = arguments.batch_size
    device = torch.device("cuda:0")
    feed = open_feed(device)
    print(json.dumps({"torch": torch.__version__, "device": torch.cuda.get_device_name(device), "batch": batch_size}))
    for case in (case for case in CASES if arguments.only in json.dumps(case)):
        told = replica_case(case, feed, device, batch_size)
        print(json.dumps({"median_ms": round(statistics.median(told["rounds_ms"]), 3), **told}), flush=True)
    told = ddp_case(feed, device, batch_size)
    print(json.dumps({"median_ms": round(statistics.median(told["rounds_ms"]), 3), **told}), flush=True)


if __name__ == "__main__":
    main()
