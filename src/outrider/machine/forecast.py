"""What a forecast of the gain says, and what it reads from the facts: relative speeds and the backend.

Does not compute gains: `virtual.gain_forecast` does, with the simulator. Called by it, and by diagnose to show them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.machine.device_memory import memory_of
from outrider.machine.devices import DeviceSpec
from outrider.machine.machine_facts import Facts, MeasuredSpeed, Reduction


@dataclass(frozen=True, kw_only=True, slots=True)
class RelativeSpeed:
    """A device's speed as a fraction of the fastest."""

    device: str
    name: str
    relative: float
    memory_bytes: int | None = None
    """What a rank may use; None where devices were not named, or nobody knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGain:
    """Throughput over the fastest device alone, were this policy used on all devices."""

    policy: str
    gain: float
    wait_fraction: float
    """Of all devices' time, waiting for other devices."""
    average_fraction: float
    """Of all devices' time, averages that computing waits for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The speeds, the gains, and the advice."""

    devices: tuple[RelativeSpeed, ...]
    gains: tuple[PolicyGain, ...]
    backend: str
    leave_out: tuple[str, ...]
    advice: str
    assumptions: tuple[str, ...]


def relative_speeds(facts: Facts) -> tuple[RelativeSpeed, ...]:
    """Cards by speed, the fastest first: the geometric mean of matrix multiplication and memory copy."""
    names = {gpu.device: gpu.name for gpu in facts.gpus}
    scores = {speed.device: _score(speed) for speed in facts.speeds if speed.device in names}
    known = {device: score for device, score in scores.items() if score}
    fastest = max(known.values(), default=1.0)
    ordered = sorted(known, key=lambda device: -known[device])
    return tuple(RelativeSpeed(device=key, name=names[key], relative=known[key] / fastest) for key in ordered)


def speeds_of(facts: Facts, specs: Sequence[DeviceSpec]) -> tuple[RelativeSpeed, ...]:
    """The same for the devices that a user names: a slice or a throttled CPU has its part of the speed."""
    names = {"cpu": facts.cpu.model or "CPU", **{gpu.device: gpu.name for gpu in facts.gpus}}
    scores = {speed.device: _score(speed) or 0.0 for speed in facts.speeds}
    own = [(spec, scores.get(spec.torch_name, 0.0) * spec.speed * (spec.share or 100) / 100) for spec in specs]
    known = sorted(((spec, score) for spec, score in own if score), key=lambda pair: -pair[1])
    return tuple(
        RelativeSpeed(
            device=str(spec),
            name=names.get(spec.torch_name, spec.torch_name),
            relative=score / known[0][1],
            memory_bytes=memory_of(facts, spec),
        )
        for spec, score in known
    )


def _score(speed: MeasuredSpeed) -> float | None:
    if not speed.matmul_tflops or not speed.memory_gb_per_s:
        return None
    return math.sqrt(speed.matmul_tflops * speed.memory_gb_per_s)


def nccl_works(reductions: tuple[Reduction, ...]) -> bool:
    tried = [reduction for reduction in reductions if reduction.backend == "nccl"]
    pairs = {reduction.devices for reduction in tried}
    return bool(tried) and pairs == {reduction.devices for reduction in tried if reduction.outcome == "ok"}


def backend_reason(reductions: tuple[Reduction, ...]) -> str:
    """Which backend is assumed, and why."""
    if not nccl_works(reductions):
        return "backend cpu: NCCL was not shown to work here"
    cures = {f"{key}={value}" for item in reductions if item.outcome == "ok" for key, value in item.environment.items()}
    settings = f" with {' '.join(sorted(cures))}" if cures else ""
    return f"backend nccl: NCCL passed its all-reduce{settings}"
