"""The plan of an iteration benchmark: models, worlds, loops (DDP and policies), and how often.

Decides which settings are valid. Starts nothing and imports no torch. Called by the command and sent to the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.bench.iteration.iteration_record import DDP
from outrider.errors import ConfigError, did_you_mean
from outrider.machine.devices import DeviceSpec
from outrider.policy.policies import FIXED_POLICIES, SHARED_STEP_POLICIES

DEFAULT_MODELS = ("resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d")
PRECISIONS = ("fp32", "bf16")
EXECUTIONS = ("auto", "eager", "compile", "graph")
BACKENDS = ("auto", "cpu", "gloo", "nccl")
"""Named here: the table of backends needs torch, and `gloo` is the word of PyTorch's own benchmark for `cpu`."""
PLAIN = "no DDP"
BLOCK = 10
"""Iterations of one loop before the next has its turn, so that disturbances affect all loops alike."""
WINDOWED_ITERATIONS = 60
"""Policies that average per window need several windows before their iterations mean anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationPlan:
    """The settings of a benchmark, checked."""

    models: tuple[str, ...]
    devices: tuple[DeviceSpec, ...]
    policies: tuple[str, ...] = ("sync",)
    backend: str = "auto"
    batch_size: int = 32
    image_size: int = 224
    bucket_mb: int = 25
    warmup: int = 5
    iterations: int = 10
    rounds: int = 5
    precision: str = "fp32"
    is_compiled: bool = False
    """Compile the model, for all loops alike."""
    execution: str = "eager"
    """How steps of our policies run: eager, compile, graph (captured), or auto."""
    timeout_s: float = 1_800.0

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("no model was named", hint="pass --model resnet50")
        for name in ("batch_size", "image_size", "iterations", "rounds"):
            _check_at_least(name, getattr(self, name), 1)
        _check_at_least("bucket_size", self.bucket_mb, 1)
        _check_at_least("warmup", self.warmup, 0)
        for policy in self.policies:
            _check_choice("policy", policy, FIXED_POLICIES)
        _check_choice("backend", self.backend, BACKENDS)
        _check_choice("precision", self.precision, PRECISIONS)
        _check_choice("execution", self.execution, EXECUTIONS)

    def iterations_of(self, runtime: str) -> int:
        """In one round."""
        is_windowed = runtime in FIXED_POLICIES and runtime not in SHARED_STEP_POLICIES
        return max(self.iterations, WINDOWED_ITERATIONS) if is_windowed else self.iterations


def world_sizes(num_devices: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, and all that are there."""
    if num_devices < 1:
        raise ConfigError(f"an iteration needs at least 1 rank, got {num_devices}", hint="pass --devices cpu")
    doubled = [1]
    while doubled[-1] * 2 <= num_devices:
        doubled.append(doubled[-1] * 2)
    return tuple(doubled) if doubled[-1] == num_devices else (*doubled, num_devices)


def runtimes(plan: IterationPlan, world_size: int) -> tuple[str, ...]:
    """The loops measured in one world; one device alone also runs without any wrapper."""
    wrapped = (DDP, *plan.policies)
    return (PLAIN, *wrapped) if world_size == 1 else wrapped


def first_at(block: int, names: Sequence[str]) -> list[str]:
    """The order of the loops in this block: each block starts with another one."""
    first = block % len(names)
    return [*names[first:], *names[:first]]


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(
            f"{name} must be a whole number >= {least}, got {value}", hint=f"pass --{name.replace('_', '-')} {least}"
        )


def _check_choice(name: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        hint = did_you_mean(value, valid, otherwise=f"choose one of {', '.join(valid)}")
        raise ConfigError(f"unknown {name} {value!r}", hint=hint)
