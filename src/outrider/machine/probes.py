"""Measures facts that cannot be read: two-rank all-reduces and the speed of each device.

Everything runs in children with a time limit, because NCCL may hang and a card may fail. Called by diagnose on a
live machine; recorded facts carry the answers instead.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from outrider.machine import child_process
from outrider.machine.devices import CARD_ORDER
from outrider.machine.machine_facts import Facts, Gpu, MeasuredSpeed, Reduction, ReductionOutcome, TorchBuild
from outrider.machine.wheels import serving_arch

REDUCE_S = 60.0
SPEED_S = 2.0
SPEED_LIMIT_S = 60.0
_SEVERITY: tuple[ReductionOutcome, ...] = ("wrong", "error", "hang", "ok")


def with_probes(facts: Facts) -> Facts:
    """The facts with all-reduces and speeds measured by the torch that training would use."""
    build = facts.torch
    if build is None or build.error is not None:
        return facts
    cards = usable_cards(facts, build)
    devices = ("cpu", *(gpu.device for gpu in cards))
    return replace(
        facts,
        reductions=tuple(measure_reductions(build, cards)),
        speeds=tuple(measure_speed(build, device) for device in devices),
    )


def usable_cards(facts: Facts, build: TorchBuild) -> tuple[Gpu, ...]:
    """The cards that this build has code for and can see."""
    # A ROCm build counts AMD cards as cuda devices, a CUDA build NVIDIA ones.
    vendor = "amd" if build.hip else "nvidia"
    cards = [gpu for gpu in facts.gpus if gpu.vendor == vendor and gpu.is_served and gpu.capability]
    running = [gpu for gpu in cards if serving_arch(gpu.capability or "", build.archs)]
    return tuple(gpu for gpu in running if gpu.index < (build.num_devices or 0))


def measure_reductions(build: TorchBuild, cards: tuple[Gpu, ...]) -> Iterator[Reduction]:
    """Gloo on the host, then NCCL between the first card and each other one."""
    yield all_reduce(build, "gloo", ("cpu", "cpu"))
    for other in cards[1:]:
        pair = (cards[0].device, other.device)
        first = all_reduce(build, "nccl", pair)
        yield first
        if first.outcome != "ok":
            yield all_reduce(build, "nccl", pair, environment={"NCCL_P2P_DISABLE": "1"})


def all_reduce(
    build: TorchBuild,
    backend: str,
    devices: tuple[str, str],
    *,
    environment: dict[str, str] | None = None,
    timeout_s: float = REDUCE_S,
) -> Reduction:
    """One all-reduce of two ranks; a hang, a crash and a wrong number are outcomes."""
    settings = dict(environment or {})
    with tempfile.TemporaryDirectory(prefix=f"outrider-{os.getpid()}-reduce-") as folder:
        ends = _run_ranks(build, backend, devices, store=Path(folder) / "store", settings=settings, timeout_s=timeout_s)
    # A rank that failed makes its peer wait, so a hang is the last explanation.
    outcome, detail = min(map(_judge, ends), key=lambda judged: _SEVERITY.index(judged[0]))
    return Reduction(backend=backend, devices=devices, outcome=outcome, detail=detail, environment=settings)


def _judge(ended: child_process.Ended) -> tuple[ReductionOutcome, str | None]:
    found = child_process.answer(ended)
    if found is not None:
        return found["outcome"], found["detail"]
    return ("hang" if ended.code is None else "error"), ended.reason or ended.last_line


def measure_speed(build: TorchBuild, device: str, *, seconds: float = SPEED_S) -> MeasuredSpeed:
    """Matrix multiplication and memory speed of one device, over about `seconds`."""
    command = (build.interpreter, str(child_process.script("speed.py")), device, str(seconds))
    ended = child_process.run(command, timeout_s=SPEED_LIMIT_S, environment=CARD_ORDER)
    found = child_process.answer(ended)
    if found is None:
        return MeasuredSpeed(device=device, error=ended.reason or ended.last_line)
    return MeasuredSpeed(device=device, **found)


def _run_ranks(
    build: TorchBuild,
    backend: str,
    devices: tuple[str, str],
    *,
    store: Path,
    settings: dict[str, str],
    timeout_s: float,
) -> list[child_process.Ended]:
    program = str(child_process.script("all_reduce.py"))
    ranks: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(len(devices)) as pool:
        try:
            for rank, device in enumerate(devices):
                command = (build.interpreter, program, str(rank), device, backend, str(store))
                ranks.append(child_process.start(command, environment={**CARD_ORDER, **settings}))
            return list(pool.map(partial(child_process.finish, timeout_s=timeout_s), ranks))
        finally:
            for started in ranks:
                child_process.kill(started)
