"""What a step on the batches of N ranks needs to teach what N steps would: rules for its rate and its momentum.

    python benchmarks/joined_batches.py --rule root --mode nccl-sync --devices cuda:0%30,cuda:0%10 --data DATA

One run of ResNet-20 for 200 epochs, not timed, under OUTPUT/RULE; it goes on where it stopped. The rules:

same    rate and momentum as for one batch
times   N times the rate (Goyal et al. 2017)
warm    the same, reached in equal steps over the first fortieth of all steps (their five of 200 epochs): the suite's
root    the root of N times the rate (Hoffer et al. 2017)
heavy   the rate as for one batch, 1 - momentum an N-th of what it was (Smith et al. 2018)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from outrider.bench.datasets.source import DataSource
from outrider.bench.suite.run_case import Planned, run_case
from outrider.bench.suite.setting_options import parse_settings
from outrider.bench.suite.suite_plan import SuiteRequest, plan
from outrider.bench.suite.sweep import make_way
from outrider.bench.tasks import Task, rising
from outrider.machine.devices import cuda_devices, resolve_devices
from outrider.replica.recipe import OptimizerFactory
from outrider.world.messages import Message

SETTINGS = ["precision=bf16", "threads_per_rank=1", "timeout_s=120", "memory_format=channels_last"]

Parameters = Iterable[torch.nn.Parameter]


def scaled(make: OptimizerFactory, factor: float, parameters: Parameters) -> torch.optim.Optimizer:
    optimizer = make(parameters)
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return optimizer


def heavier(make: OptimizerFactory, num_ranks: int, parameters: Parameters) -> torch.optim.Optimizer:
    optimizer = make(parameters)
    for group in optimizer.param_groups:
        group["momentum"] = 1 - (1 - group["momentum"]) / num_ranks
    return optimizer


def times(task: Task, num_ranks: int) -> Task:
    return replace(task, optimizer=partial(scaled, task.optimizer, num_ranks))


def warm(task: Task, num_ranks: int) -> Task:
    assert task.joined_warm_up is not None
    return replace(times(task, num_ranks), scheduler=rising(task.scheduler, num_ranks, task.joined_warm_up))


def root(task: Task, num_ranks: int) -> Task:
    return replace(task, optimizer=partial(scaled, task.optimizer, num_ranks**0.5))


def heavy(task: Task, num_ranks: int) -> Task:
    return replace(task, optimizer=partial(heavier, task.optimizer, num_ranks))


RULES: dict[str, Callable[[Task, int], Task]] = {
    "same": lambda task, num_ranks: task,
    "times": times,
    "warm": warm,
    "root": root,
    "heavy": heavy,
}


def ruled(planned: Planned, rule: str) -> Planned:
    """The same case by another rule than the suite's own."""

    def make_task() -> Task:
        ruled_task = RULES[rule](planned.make_task(), len(planned.case.devices))
        return replace(ruled_task, joined_warm_up=None)

    return replace(planned, make_task=make_task)


def tell(message: Message) -> None:
    if message.kind == "epoch":
        print("epoch", message.fields["epoch"], "evaluation", message.fields["eval"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", choices=RULES, required=True)
    parser.add_argument("--mode", default="nccl-sync")
    parser.add_argument("--devices", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--output", type=Path, default=Path("runs/joined"))
    given = parser.parse_args()
    devices = resolve_devices(given.devices, cuda_devices=cuda_devices()).devices
    request = SuiteRequest(
        models=("resnet20-graph" if given.mode == "graph-sync" else "resnet20",),
        modes=(given.mode,),
        devices=devices,
        data=DataSource(folder=given.data, max_samples=given.samples, may_download=False),
        num_seeds=given.seed + 1,
        epochs=given.epochs,
        depth=given.depth,
        settings=parse_settings(SETTINGS, num_devices=len(devices)),
        is_timed=False,
    )
    planned = ruled(plan(request)[-1], given.rule)
    folder = given.output / given.rule / planned.case.folder
    make_way(folder, planned.case)
    run = run_case(planned, folder, on_message=tell)
    print(given.rule, given.mode, "seed", given.seed, "ends at", run.epochs[-1].eval)


if __name__ == "__main__":
    main()
