"""Parses a what-if question from the command line, and shows the answers for all policies in a table.

Decides the notation of speeds and links, and the layout of the table; the simulator computes. Called by `outrider
simulate`. Does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from outrider.errors import ConfigError
from outrider.machine.devices import DeviceSpec, parse_devices
from outrider.virtual.simulator import Outcome, Scenario

SCHEMA_VERSION = 1
_REPEATED = re.compile(r"(?P<device>.+?)(?:x(?P<count>\d+))?")
_LINK = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z/]+)", re.IGNORECASE)
_BYTES_PER_S = {
    "kbit": 1e3 / 8,
    "mbit": 1e6 / 8,
    "gbit": 1e9 / 8,
    "tbit": 1e12 / 8,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
}
_SPEED_HINT = "write speeds such as 1,0.4,0.4, or devices such as cuda:0,cpu@0.4; 0.4x16 stands for sixteen of them"


def parse_speeds(text: str) -> tuple[float, ...]:
    """Parse relative speeds of devices, separated by commas: numbers, or device specs; `0.4x16` is 16 devices."""
    speeds: list[float] = []
    for part in (part.strip() for part in text.split(",")):
        match = _REPEATED.fullmatch(part)
        if match is None or match["count"] == "0":
            raise ConfigError(f"no speed in {part!r}", hint=_SPEED_HINT)
        speeds += [_speed(match["device"])] * int(match["count"] or 1)
    return tuple(speeds)


def _speed(text: str) -> float:
    if text == "auto":
        raise ConfigError("simulate needs speeds or device specs, got auto", hint=_SPEED_HINT)
    try:
        speed = float(text)
    except ValueError:
        return _speed_of(parse_devices(text)[0])
    if not 0 < speed < math.inf:
        raise ConfigError(f"the speed of a device must be above 0, got {text}", hint=_SPEED_HINT)
    return speed


def _speed_of(spec: DeviceSpec) -> float:
    """The speed given in a spec; speeds of different kinds of devices are not compared."""
    return spec.speed if spec.share is None else spec.share / 100


def parse_link(text: str) -> float:
    """Parse a bandwidth such as `1gbit`, `100mbit` or `12GB/s` to bytes per second."""
    match = _LINK.fullmatch(text.strip())
    unit = match["unit"].lower().removesuffix("/s") if match else ""
    if match is None or unit not in _BYTES_PER_S or float(match["number"]) == 0:
        raise ConfigError(f"no speed of a link: {text!r}", hint="write 1gbit, 100mbit or 12GB/s")
    return float(match["number"]) * _BYTES_PER_S[unit]


def megabytes(number: float) -> int:
    """Convert the size of a model from MB to bytes."""
    if not 0 <= number < math.inf:
        raise ConfigError(f"the size of a model must be finite and >= 0 MB, got {number:g}", hint="write 100")
    return round(number * 1e6)


def as_table(scenario: Scenario, outcomes: Iterable[Outcome]) -> str:
    """The outcomes as a table, one line per policy, at most 80 columns wide."""
    lines = [_head(scenario), "", f"{'policy':<12}{'samples/s':>12}{'gain':>9}{'efficiency':>13}{'waiting':>10}"]
    lines[-1] += f"{'averaging':>12}{'averages':>11}"
    for one in outcomes:
        lines.append(
            f"{one.policy:<12}{_shown(one.samples_per_s, 1):>12}{_shown(one.gain, 2):>7} ×{one.efficiency:>13.1%}"
            f"{one.wait_fraction:>10.1%}{one.exposed_average_fraction:>12.1%}{one.averages:>11,}"
        )
    return "\n".join(lines)


def _shown(value: float, digits: int) -> str:
    """Format a number; large numbers get no decimals, so that they do not run into the column before."""
    return f"{value:,.{digits}f}" if value < 1000 else f"{value:,.0f}"


def _head(scenario: Scenario) -> str:
    devices, network = len(scenario.speeds), scenario.network
    average_ms = network.all_reduce_ms(scenario.model_bytes, devices)
    return (
        f"{devices:,} device{'' if devices == 1 else 's'}, {scenario.num_samples:,} samples in batches of"
        f" {scenario.batch_size}, {average_ms:,.1f} ms per average"
    )


def as_document(scenario: Scenario, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The outcomes for programs, without values that grow with the number of devices."""
    return {
        "schema_version": SCHEMA_VERSION,
        "devices": len(scenario.speeds),
        "num_samples": scenario.num_samples,
        "batch_size": scenario.batch_size,
        "model_bytes": scenario.model_bytes,
        "average_ms": scenario.network.all_reduce_ms(scenario.model_bytes, len(scenario.speeds)),
        "policies": [
            {
                "policy": one.policy,
                "samples_per_s": one.samples_per_s,
                "ideal_samples_per_s": one.ideal_samples_per_s,
                "gain": one.gain,
                "efficiency": one.efficiency,
                "wall_s": one.wall_s,
                "wait_fraction": one.wait_fraction,
                "exposed_average_fraction": one.exposed_average_fraction,
                "averages": one.averages,
            }
            for one in outcomes
        ],
    }
