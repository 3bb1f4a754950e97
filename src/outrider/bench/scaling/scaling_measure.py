"""Trains the same model and data on one device, and with DataParallel, DDP, FSDP2 and our policies on 1..N devices.

Decides the order of runs and turns their epochs into rows; each run has its own processes. Called by
`outrider bench scaling` and by the notebook.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean

import torch
from torch import nn

from outrider.bench.datasets.cifar10 import crop_and_flip
from outrider.bench.datasets.source import DataSource, Located, locate, open_part
from outrider.bench.iteration.models import IMAGENET_MODELS
from outrider.bench.measures import after_warm_up, mean_over_time, samples_per_s
from outrider.bench.models.image_models import bytes_cross_entropy_step
from outrider.bench.modes import ModeResult, obstacle, parse_mode, run_mode
from outrider.bench.peers import peer
from outrider.bench.scaling.fsdp import FSDP2
from outrider.bench.scaling.scaling_plan import FSDP, SINGLE, Job, ScalingPlan, jobs
from outrider.bench.scaling.scaling_record import ScalingRecord, ScalingRow
from outrider.bench.tasks import Task
from outrider.bench.zoo import ENTRIES
from outrider.errors import OutriderError, unknown_name
from outrider.machine.devices import num_cores, threads_per_rank
from outrider.policy.policies import POLICY_TABLE
from outrider.record.run_record import commit, environment

NUM_CLASSES = 10
# A step of a large model on one core takes minutes where a GPU takes milliseconds.
_TIMEOUT_S = 3_600.0

Tell = Callable[[str], None]


def compare_ways(
    plan: ScalingPlan, *, tell: Tell, keep: Callable[[ScalingRecord], None] = lambda record: None
) -> ScalingRecord:
    """Run everything, rounds outermost, so that a noisy machine hurts all ways alike.

    `keep` gets the record after every run; a way that fails is reported with its reason and skipped.
    """
    source = DataSource(folder=plan.data, may_download=plan.may_download, max_samples=plan.samples)
    located = locate("cifar10", source)
    tell(f"data: {located.title} ({located.reason.splitlines()[0]})")
    results: defaultdict[Job, list[ModeResult]] = defaultdict(list)
    obstacles = {job: reason for job in jobs(plan) if (reason := _obstacle(job)) is not None}
    order = [job for job in jobs(plan) if job not in obstacles]
    for round_number in range(1, plan.rounds + 1):
        for number, job in enumerate(order, start=1):
            if job in obstacles:
                continue
            place = f"round {round_number} of {plan.rounds}, {number} of {len(order)}"
            try:
                results[job].append(_run(job, plan, located, round_number))
                outcome = f"{samples_per_s(results[job][-1].epochs):,.0f} samples/s"
            except OutriderError as error:
                obstacles[job] = outcome = f"it failed: {error.message}"
            tell(f"{place}: {job.model}, {job.title} on {_names(job)}: {outcome}")
            keep(_record(plan, located, results, obstacles))
    return _record(plan, located, results, obstacles)


def _record(
    plan: ScalingPlan, located: Located, results: Mapping[Job, Sequence[ModeResult]], obstacles: Mapping[Job, str]
) -> ScalingRecord:
    known = [job for job in jobs(plan) if job in results or job in obstacles]
    return ScalingRecord(
        rows=tuple(_row(job, results.get(job, []), obstacles.get(job)) for job in known),
        data_name=located.title,
        batch_size=plan.batch_size,
        epochs=plan.epochs,
        rounds=plan.rounds,
        num_samples=located.num_train,
        environment=environment() | {"threads_per_rank": threads_per_rank(plan.devices, num_cores())[0]},
        commit=commit(),
    )


def check_models(names: Sequence[str]) -> None:
    """Refuse a name before anything runs."""
    for name in names:
        model_maker(name)


def model_maker(name: str) -> Callable[[], nn.Module]:
    """Networks for colour images of any size, with a head for ten classes."""
    small = {entry.name: entry.make_model for entry in ENTRIES.values() if entry.data == "cifar10"}
    if name in IMAGENET_MODELS:
        return partial(IMAGENET_MODELS[name], num_classes=NUM_CLASSES)
    if name in small:
        return small[name]
    raise unknown_name("model for CIFAR-10", name, (*IMAGENET_MODELS, *small))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=5e-4)


def scaling_task(job: Job, plan: ScalingPlan, located: Located) -> Task:
    """A policy whose batch is that of the whole world gets as many samples per step as the other ways."""
    spec = POLICY_TABLE.get(job.way)
    return Task(
        name=job.model,
        data_name=located.title,
        model=model_maker(job.model),
        optimizer=sgd,
        step=bytes_cross_entropy_step,
        dataset=partial(open_part, located, "train"),
        batch_size=plan.batch_size if spec is None else spec.batch_size_for(plan.batch_size, job.num_devices),
        epochs=plan.epochs,
        augment=crop_and_flip,
        is_stand_in=located.is_stand_in,
        seed=plan.seed,
    )


def _run(job: Job, plan: ScalingPlan, located: Located, round_number: int) -> ModeResult:
    task = scaling_task(job, plan, located)
    mode = parse_mode(_mode_name(job), num_devices=job.num_devices)
    run_dir = plan.output / f"round-{round_number}" / f"{job.model}-{job.way}-{_names(job)}"
    # A rank has the threads that it has beside all others, however many of them take part.
    settings = {"timeout_s": _TIMEOUT_S, "threads_per_rank": threads_per_rank(plan.devices, num_cores())[0]}
    starter = FSDP2.start if job.way == FSDP else None
    return run_mode(mode, task, devices=job.devices, run_dir=run_dir, settings=settings, starter=starter)


def _mode_name(job: Job) -> str:
    """FSDP2 is ordered as `sync` is: equal batches, a mean gradient at every step."""
    return {SINGLE: "solo-0", FSDP: "sync"}.get(job.way, job.way)


def _obstacle(job: Job) -> str | None:
    if job.way == FSDP:
        return peer.obstacle(FSDP2, job.devices)
    return obstacle(parse_mode(_mode_name(job), num_devices=job.num_devices), job.devices)


def _names(job: Job) -> str:
    return ",".join(map(str, job.devices))


def _row(job: Job, results: Sequence[ModeResult], obstacle: str | None) -> ScalingRow:
    devices = tuple(map(str, job.devices))
    if obstacle is not None:
        return ScalingRow(model=job.model, way=job.way, devices=devices, obstacle=obstacle)
    counted = [epoch for result in results for epoch in after_warm_up(result.epochs)]
    return ScalingRow(
        model=job.model,
        way=job.way,
        devices=devices,
        epoch_s=tuple(epoch.seconds for epoch in counted),
        samples_per_s=sum(epoch.samples for epoch in counted) / sum(epoch.seconds for epoch in counted),
        average_part=_mean_over_rounds(results, "exposed_average_fraction"),
        wait_part=_mean_over_rounds(results, "wait_fraction"),
        peak_memory_bytes=results[-1].epochs[-1].peak_memory_bytes_by_rank,
    )


def _mean_over_rounds(results: Sequence[ModeResult], name: str) -> float | None:
    parts = [mean_over_time(result.epochs, name) for result in results]
    known = [part for part in parts if part is not None]
    return fmean(known) if len(known) == len(parts) else None
