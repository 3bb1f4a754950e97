"""Whether the memory of named devices is there: their limits, and what a model needs of each.

Decides the verdicts about memory of `outrider diagnose --devices`. A run checks the same with its own model before it
trains. Opens no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.machine.devices import DeviceSpec
from outrider.machine.machine_facts import Facts
from outrider.machine.verdicts import Verdict


def whole_memory(facts: Facts, spec: DeviceSpec) -> int | None:
    """Bytes of the device itself; None where nobody knows."""
    if spec.kind == "cpu":
        return facts.memory.total_bytes
    return next((gpu.memory_bytes for gpu in facts.gpus if gpu.device == spec.torch_name and gpu.is_served), None)


def memory_of(facts: Facts, spec: DeviceSpec) -> int | None:
    """Bytes that a rank on this device may use: its limit, or the device's own."""
    return whole_memory(facts, spec) if spec.memory_bytes is None else spec.memory_bytes


def judge_memory(facts: Facts, specs: Sequence[DeviceSpec]) -> Iterator[Verdict]:
    """One verdict per device that is asked for, and one per device whose limits together are too much."""
    for spec in specs:
        yield _judge_one(facts, spec)
    for name in dict.fromkeys(spec.torch_name for spec in specs):
        limits = [spec.memory_bytes for spec in specs if spec.torch_name == name and spec.memory_bytes is not None]
        whole = next(whole_memory(facts, spec) for spec in specs if spec.torch_name == name)
        if len(limits) > 1 and whole is not None and max(limits) <= whole < sum(limits):
            yield Verdict(
                check="memory",
                level="failure",
                what=f"the limits of {name} add up to {_gib(sum(limits))} of {_gib(whole)}",
                why="ranks of one device share its memory",
                hint="lower the limits",
            )


def _judge_one(facts: Facts, spec: DeviceSpec) -> Verdict:
    whole = whole_memory(facts, spec)
    is_known = spec.kind != "cuda" or any(gpu.device == spec.torch_name and gpu.is_served for gpu in facts.gpus)
    if not is_known:
        there = ", ".join(gpu.device for gpu in facts.gpus if gpu.is_served) or "no card"
        return Verdict(
            check="memory", level="failure", what=f"{spec} is not there", why=f"found: {there}", hint="name another"
        )
    if whole is None:
        return Verdict(check="memory", level="warning", what=f"{spec}: its memory is not known", why="not found")
    if spec.memory_bytes is not None and spec.memory_bytes > whole:
        return Verdict(
            check="memory",
            level="failure",
            what=f"{spec} asks for more memory than there is",
            why=f"{spec.torch_name} has {_gib(whole)}",
            hint="lower the limit, or leave it out",
        )
    limit = "" if spec.memory_bytes is None else f"{_gib(spec.memory_bytes)} of "
    return Verdict(check="memory", level="ok", what=f"{spec}: {limit}{_gib(whole)} of memory", why="a rank may use it")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
