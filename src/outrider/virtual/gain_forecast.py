"""Forecasts the gain of training on all devices over the fastest device alone, for each policy, before a run starts.

Simulates a reference model on the measured speeds; its assumptions are stated with the result. Measures nothing.
Called by `outrider diagnose`. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.machine.devices import DeviceSpec
from outrider.machine.forecast import (
    Forecast,
    PolicyGain,
    RelativeSpeed,
    backend_reason,
    nccl_works,
    relative_speeds,
    speeds_of,
)
from outrider.machine.machine_facts import Facts, Reduction
from outrider.policy.policies import TRAINING_POLICIES
from outrider.virtual.simulator import Network, Scenario, simulate

MODEL = "ResNet-50"
MODEL_BYTES = 102_228_128
NEEDED_BYTES = 5 * MODEL_BYTES
"""Memory needed on each device, before activations: model, gradients, momentum, and averages with a snapshot."""
STEP_MS = 97.0
"""Time of a step of 32 images on one V100."""
NETWORKS = {
    "nccl": Network(latency_ms=0.02, bandwidth_bytes_per_s=17e9),
    "cpu": Network(latency_ms=0.05, bandwidth_bytes_per_s=1.2e9),
}
"""The exposed cost of an all-reduce. NCCL: a DDP step took 103 ms on two V100s and 97 ms on one; the rest is hidden
behind the backward pass. Host: a step took 1.75 times as long as over NCCL, for ResNet-20 on two mismatched cards."""
BATCHES = 1000
WORTHWHILE_GAIN = 1.05
"""A device that adds less than this is not worth its memory, power and noise."""


def forecast(facts: Facts, specs: Sequence[DeviceSpec] = ()) -> Forecast | None:
    """The gain of training on all cards, or on the devices of these specs; None if fewer than two were measured."""
    known = speeds_of(facts, specs) if specs else relative_speeds(facts)
    devices = tuple(one for one in known if one.memory_bytes is None or one.memory_bytes >= NEEDED_BYTES)
    small = [one for one in known if one not in devices]
    if len(devices) < 2:
        return _without_small(known, small, facts) if small else None
    # The fastest device may have been left out because of its memory.
    devices = tuple(replace(one, relative=one.relative / devices[0].relative) for one in devices)
    is_all_cards = all(spec.kind == "cuda" for spec in specs)
    backend = "nccl" if nccl_works(facts.reductions) and is_all_cards else "cpu"
    speeds = [device.relative for device in devices]
    gains = policy_gains(speeds, backend=backend)
    slow = tuple(devices[index].device for index in slow_devices(speeds, backend=backend))
    return Forecast(
        devices=devices,
        gains=gains,
        backend=backend,
        leave_out=(*(one.device for one in small), *slow),
        advice="; ".join([*_too_small(small), _advice(devices, gains, slow, backend)]),
        assumptions=(*_assumptions(facts.reductions, backend), *_memory_assumption(devices)),
    )


def _without_small(known: Sequence[RelativeSpeed], small: Sequence[RelativeSpeed], facts: Facts) -> Forecast:
    """The forecast if at most one device has enough memory."""
    kept = [one.device for one in known if one not in small]
    rest = f"{kept[0]} trains alone" if kept else "no device is left"
    return Forecast(
        devices=tuple(known),
        gains=(),
        backend="cpu",
        leave_out=tuple(one.device for one in small),
        advice="; ".join([*_too_small(small), rest]),
        assumptions=_memory_assumption(known),
    )


def _too_small(small: Sequence[RelativeSpeed]) -> list[str]:
    named = ", ".join(one.device for one in small)
    return [f"leave {named} out: {MODEL} needs {NEEDED_BYTES / 1e6:.0f} MB there"] if small else []


def _memory_assumption(devices: Sequence[RelativeSpeed]) -> tuple[str, ...]:
    if all(one.memory_bytes is None for one in devices):
        return ()
    return (
        f"memory: {NEEDED_BYTES / 1e6:.0f} MB for {MODEL} with SGD, its gradients and averages; its batch is cut into "
        "micro-batches that fit the rest",
    )


def policy_gains(speeds: Sequence[float], *, backend: str) -> tuple[PolicyGain, ...]:
    """The gain of each policy; `speeds` are fractions of the fastest device."""
    scenario = Scenario.from_speeds(
        speeds, step_ms=STEP_MS, batches=BATCHES, model_bytes=MODEL_BYTES, network=NETWORKS[backend]
    )
    assert scenario.planner is not None
    # Simulate the middle of a long run: speed hints avoid the cost of the first windows, whose paces are unknown.
    scenario = replace(scenario, planner=replace(scenario.planner, speed_hints=tuple(speeds)))
    outcomes = [simulate(policy, scenario) for policy in TRAINING_POLICIES]
    return tuple(
        PolicyGain(
            policy=one.policy,
            gain=one.gain,
            wait_fraction=one.wait_fraction,
            average_fraction=one.exposed_average_fraction,
        )
        for one in outcomes
    )


def slow_devices(speeds: Sequence[float], *, backend: str) -> tuple[int, ...]:
    """Indices, slowest first, of devices that add too little; `speeds` are sorted, fastest first."""
    left_out: list[int] = []
    for index in range(len(speeds) - 1, 0, -1):
        with_it = _best_gain(speeds[: index + 1], backend)
        without = _best_gain(speeds[:index], backend)
        if with_it >= without * WORTHWHILE_GAIN:
            break
        left_out.append(index)
    return tuple(left_out)


def _best_gain(speeds: Sequence[float], backend: str) -> float:
    if len(speeds) == 1:
        return 1.0
    return max(gain.gain for gain in policy_gains(speeds, backend=backend))


def _advice(
    devices: Sequence[RelativeSpeed], gains: Sequence[PolicyGain], leave_out: Sequence[str], backend: str
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


def _assumptions(reductions: tuple[Reduction, ...], backend: str) -> tuple[str, ...]:
    gb_per_s = NETWORKS[backend].bandwidth_bytes_per_s / 1e9
    return (
        "speed of a device: geometric mean of its float32 matmul and memory copy; real models lie between",
        backend_reason(reductions),
        f"simulated: {MODEL}, {STEP_MS:g} ms a step on the fastest, averages of {MODEL_BYTES / 1e6:.0f} MB at"
        f" {gb_per_s:g} GB/s; small models, whose steps are short, gain less",
    )
