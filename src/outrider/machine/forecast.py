"""Forecasts what training on all devices gains over the fastest alone, policy by policy, before anyone starts.

The formulas and their assumptions are stated with the result. Measures nothing: reads the speeds in the facts. Called
by diagnose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.machine.facts import Facts, Reduction, Speed

STEP_EFFICIENCY = 0.94
"""Averaging gradients at every step over NCCL: ResNet-50 on V100s, 0.097 s alone, 0.103 s with DDP on two."""
HOST_STEP_FACTOR = 0.57
"""The same over the host: 4356 s against 2491 s for ResNet-20 on two mismatched cards."""
CADENCE_EFFICIENCY = 0.92
ASYNC_EFFICIENCY = 0.98
"""Blocking and overlapped averages against no averaging: the lower ends of 0.92 to 0.97 and 0.98 to 1.0, anchor 20."""
WORTHWHILE_GAIN = 1.05
"""A device that adds less than this is not worth its memory, power and noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpeed:
    """A device's speed as a fraction of the fastest."""

    device: str
    name: str
    relative: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGain:
    """Throughput over the fastest device alone, were this policy used on all devices."""

    policy: str
    gain: float
    formula: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The speeds, the gains, and the advice."""

    devices: tuple[DeviceSpeed, ...]
    gains: tuple[PolicyGain, ...]
    backend: str
    leave_out: tuple[str, ...]
    advice: str
    assumptions: tuple[str, ...]


def forecast(facts: Facts) -> Forecast | None:
    """The gain of training on all cards; None where fewer than two were measured."""
    devices = relative_speeds(facts)
    if len(devices) < 2:
        return None
    backend = "nccl" if _nccl_works(facts.reductions) else "cpu"
    speeds = [device.relative for device in devices]
    gains = policy_gains(speeds, backend=backend)
    leave_out = slow_devices(speeds, backend=backend)
    names = tuple(devices[index].device for index in leave_out)
    return Forecast(
        devices=devices,
        gains=gains,
        backend=backend,
        leave_out=names,
        advice=_advice(devices, gains, names, backend),
        assumptions=_assumptions(facts.reductions),
    )


def relative_speeds(facts: Facts) -> tuple[DeviceSpeed, ...]:
    """Cards by speed, the fastest first: the geometric mean of matrix multiplication and memory copy."""
    names = {gpu.device: gpu.name for gpu in facts.gpus}
    scores = {speed.device: _score(speed) for speed in facts.speeds if speed.device in names}
    known = {device: score for device, score in scores.items() if score}
    fastest = max(known.values(), default=1.0)
    ordered = sorted(known, key=lambda device: -known[device])
    return tuple(DeviceSpeed(device=key, name=names[key], relative=known[key] / fastest) for key in ordered)


def policy_gains(speeds: list[float], *, backend: str) -> tuple[PolicyGain, ...]:
    """The gain of each policy; `speeds` are fractions of the fastest device."""
    step = STEP_EFFICIENCY * (1.0 if backend == "nccl" else HOST_STEP_FACTOR)
    total, in_step = sum(speeds), len(speeds) * min(speeds)
    return (
        PolicyGain(policy="sync", gain=in_step * step, formula=f"devices × slowest × {step:.2f}"),
        # Where sharing every step would lose, the others rest.
        PolicyGain(policy="balanced", gain=max(1.0, total * step), formula=f"sum of speeds × {step:.2f}, at least 1"),
        PolicyGain(policy="cadence", gain=total * CADENCE_EFFICIENCY, formula=f"sum of speeds × {CADENCE_EFFICIENCY}"),
        PolicyGain(policy="async", gain=total * ASYNC_EFFICIENCY, formula=f"sum of speeds × {ASYNC_EFFICIENCY}"),
    )


def slow_devices(speeds: list[float], *, backend: str) -> tuple[int, ...]:
    """Indices, slowest first, of devices that add less than is worthwhile; `speeds` are sorted, fastest first."""
    left_out: list[int] = []
    for index in range(len(speeds) - 1, 0, -1):
        with_it = _best_gain(speeds[: index + 1], backend)
        without = _best_gain(speeds[:index], backend)
        if with_it >= without * WORTHWHILE_GAIN:
            break
        left_out.append(index)
    return tuple(left_out)


def _best_gain(speeds: list[float], backend: str) -> float:
    if len(speeds) == 1:
        return speeds[0]
    return max(gain.gain for gain in policy_gains(speeds, backend=backend))


def _score(speed: Speed) -> float | None:
    if not speed.matmul_tflops or not speed.memory_gb_per_s:
        return None
    return math.sqrt(speed.matmul_tflops * speed.memory_gb_per_s)


def _nccl_works(reductions: tuple[Reduction, ...]) -> bool:
    tried = [reduction for reduction in reductions if reduction.backend == "nccl"]
    pairs = {reduction.devices for reduction in tried}
    return bool(tried) and pairs == {reduction.devices for reduction in tried if reduction.outcome == "ok"}


def _advice(
    devices: tuple[DeviceSpeed, ...], gains: tuple[PolicyGain, ...], leave_out: tuple[str, ...], backend: str
) -> str:
    if not leave_out:
        best = max(gains, key=lambda gain: gain.gain)
        return f"train on all with {best.policy}: about {best.gain:.2f} × the fastest alone"
    named = ", ".join(
        f"{item.device} ({item.relative:.0%} of the fastest)" for item in devices if item.device in leave_out
    )
    kept = [item for item in devices if item.device not in leave_out]
    if len(kept) == 1:
        return f"leave {named} out: {kept[0].device} alone is about as fast"
    best_gain = _best_gain([item.relative for item in kept], backend)
    return f"leave {named} out: the others reach about {best_gain:.2f} × the fastest alone"


def _assumptions(reductions: tuple[Reduction, ...]) -> tuple[str, ...]:
    return (
        "speed of a device: geometric mean of its float32 matmul and memory copy; real models lie between",
        _backend_reason(reductions),
        "efficiencies are measured ones of ResNets; small models, whose steps are short, gain less",
    )


def _backend_reason(reductions: tuple[Reduction, ...]) -> str:
    if not _nccl_works(reductions):
        return "backend cpu: NCCL was not shown to work here"
    cures = {f"{key}={value}" for item in reductions if item.outcome == "ok" for key, value in item.environment.items()}
    settings = f" with {' '.join(sorted(cures))}" if cures else ""
    return f"backend nccl: NCCL passed its all-reduce{settings}"
